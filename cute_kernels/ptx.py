"""Instructions of Hopper that several kernels issue as PTX. Imports the compiler: what runs without it must not import this."""

from typing import Any

from cutlass import Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def asm(text: str, constraints: str, *operands: Any, loc: Any = None, ip: Any = None) -> None:
    """An instruction that is issued as it is written and not moved across memory accesses."""
    _issue(text, constraints, None, operands, True, loc, ip)


def pure(text: str, constraints: str, result: Any, *operands: Any, loc: Any = None, ip: Any = None) -> Any:
    """An instruction that gives a value, of MLIR type `result`, and does nothing else."""
    return _issue(text, constraints, result, operands, False, loc, ip)


def opaque(text: str, constraints: str, result: Any, *operands: Any, loc: Any = None, ip: Any = None) -> Any:
    """As `pure`, but issued where it stands, each time."""
    return _issue(text, constraints, result, operands, True, loc, ip)


def _issue(text: str, constraints: str, result: Any, operands: Any, stays: bool, loc: Any, ip: Any) -> Any:
    return llvm.inline_asm(
        result,
        list(operands),
        text,
        constraints,
        has_side_effects=stays,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def copy_box_by(
    instruction: str, target: Any, tensor_map: Any, place: tuple[Any, ...], barrier: Any, loc: Any, ip: Any
) -> None:
    """Copy one box of a 3-D tensor map to shared memory; place: its column, row and index."""
    ints = [Int32(x).ir_value(loc=loc, ip=ip) for x in (*place, barrier)]
    asm(
        f"{instruction} [$0], [$1, {{$2, $3, $4}}], [$5];",
        "r,l,r,r,r,r,~{memory}",
        Int32(target).ir_value(loc=loc, ip=ip),
        Int64(tensor_map).ir_value(loc=loc, ip=ip),
        *ints,
        loc=loc,
        ip=ip,
    )


def arrive_by(instruction: str, barrier: Any, is_one: Any, loc: Any, ip: Any) -> None:
    """Arrive at a barrier, in the threads for which `is_one` holds; no branch."""
    text = f"{{\n\t.reg .pred P1;\n\tsetp.ne.b32 P1, $1, 0;\n\t@P1 {instruction} _, [$0];\n\t}}"
    asm(text, "r,r,~{memory}", *[Int32(x).ir_value(loc=loc, ip=ip) for x in (barrier, is_one)], loc=loc, ip=ip)


@dsl_user_op
def wait(barrier: cute.Pointer, phase: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Wait for a phase of a barrier in shared memory. It spins: `mbarrier_wait` of the DSL sleeps between two looks."""
    text = (
        "{\n\t.reg .pred P1;\n\tLAB_WAIT:\n\tmbarrier.try_wait.parity.shared::cta.b64 P1, [$0], $1;\n\t"
        "@P1 bra.uni DONE;\n\tbra.uni LAB_WAIT;\n\tDONE:\n\t}"
    )
    address = barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    asm(text, "r,r,~{memory}", address, Int32(phase).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def expect_bytes(barrier: Int32, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive at a barrier and announce bytes; one thread does."""
    asm(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        "r,r,~{memory}",
        Int32(barrier).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def of_block(address: Int32, rank: int | Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """An address in this block's shared memory, as the same place in another block of the cluster."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, rank)]
    return Int32(pure("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", T.i32(), *operands, loc=loc, ip=ip))


@dsl_user_op
def map_address(atom: cute.CopyAtom, barrier: cute.Pointer, *, loc: Any = None, ip: Any = None) -> Int64:
    """Generic address of the tensor map behind a TMA atom."""
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    pointer = cute_nvgpu.get_tma_desc_addr(kind, atom._unpack(loc=loc, ip=ip, tma_bar_ptr=barrier), loc=loc, ip=ip)
    return Int64(cute_nvgpu.cast_tma_desc_to_integer(T.i64(), pointer.value, loc=loc, ip=ip))
