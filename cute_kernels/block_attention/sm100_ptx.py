"""Instructions that the sm100 schedule issues as PTX, and the descriptors that its products take. Imports the compiler.

Operands lie in shared memory in atoms of 8 rows of 128 bytes, swizzled by 128 bytes, 1,024 bytes each. The descriptors are as
the PTX ISA 8.8 has them (tcgen05, "Shared memory descriptor" and "Instruction descriptor"); the compiler's own product atoms
make the same words for the same layouts, but elect a thread for each product. Here one thread issues all products and commits:
a commit covers what its own thread issued.
"""

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_kernels.block_attention.config import SM100_BLOCK
from cute_kernels.ptx import arrive_by, asm, copy_box_by

ATOM_BYTES = 1024
ADDRESS = 0x3FFF  # the bits of a descriptor that hold an address in shared memory, in steps of 16 bytes
SWIZZLED = 2 << 61 | 1 << 46 | (ATOM_BYTES >> 4) << 32  # 128-byte swizzle, version of sm_100, an atom to the next one's rows


def rows_descriptor(address: Int32) -> Int64:
    """Of an operand whose rows hold 64 consecutive elements of the summed dim: queries, keys, weights."""
    return Int64((address >> 4) & ADDRESS) + Int64(SWIZZLED | 1 << 16)


def columns_descriptor(address: Int32, next_columns: int) -> Int64:
    """Of an operand whose rows are the summed dim and hold 64 columns; the next 64 lie `next_columns` bytes behind."""
    return Int64((address >> 4) & ADDRESS) + Int64(SWIZZLED | (next_columns >> 4) << 16)


def product(dtype: type[cutlass.Numeric], columns: int, is_by_columns: bool) -> int:
    """Instruction descriptor: 128 rows by `columns` in fp32, operands of `dtype`; the second as rows or by columns."""
    kind = 1 if dtype is cutlass.BFloat16 else 0
    return 1 << 4 | kind << 7 | kind << 10 | int(is_by_columns) << 16 | columns >> 3 << 17 | SM100_BLOCK >> 4 << 24


@dsl_user_op
def multiply(target: Int32, a: Int64, b: Int64, what: int, is_added: cutlass.Boolean, *, loc=None, ip=None) -> None:
    """Issue a product of 16 summed elements by both blocks' tensor cores, to tensor memory; one thread of the leader does."""
    text = "{\n\t.reg .pred P1;\n\tsetp.ne.b32 P1, $4, 0;\n\ttcgen05.mma.cta_group::2.kind::f16 [$0], $1, $2, $3, P1;\n\t}"
    asm(
        text,
        "r,l,l,r,r,~{memory}",
        Int32(target).ir_value(loc=loc, ip=ip),
        Int64(a).ir_value(loc=loc, ip=ip),
        Int64(b).ir_value(loc=loc, ip=ip),
        Int32(what).ir_value(loc=loc, ip=ip),
        Int32(is_added).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def commit(barrier: Int32, *, loc=None, ip=None) -> None:
    """Arrive at the barrier of this address in both blocks when all products that this thread issued have retired."""
    text = (
        "{\n\t.reg .b16 both;\n\tmov.b16 both, 3;\n\t"
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [$0], both;\n\t}"
    )
    asm(text, "r,~{memory}", Int32(barrier).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def before_meeting(*, loc=None, ip=None) -> None:
    """Order this thread's accesses of tensor memory before what it does next to tell other threads."""
    asm("tcgen05.fence::before_thread_sync;", "~{memory}", loc=loc, ip=ip)


@dsl_user_op
def after_meeting(*, loc=None, ip=None) -> None:
    """Order this thread's accesses of tensor memory behind what other threads told it."""
    asm("tcgen05.fence::after_thread_sync;", "~{memory}", loc=loc, ip=ip)


@dsl_user_op
def load(address: Int32, count: int, *, loc=None, ip=None) -> list[Float32]:
    """A lane's `count` columns of tensor memory from an address on, that of the warp's first lane. All threads of a warp do.

    Meeting, load and wait are one statement: a warp that has parted is whole again, and nothing touches the registers early.
    """
    names = ", ".join(f"${i}" for i in range(count))
    text = "bar.warp.sync -1;\n\t"
    text += f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{names}}}, [${count}];\n\ttcgen05.wait::ld.sync.aligned;"
    kind = llvm.StructType.get_literal([T.f32()] * count)
    constraints = ",".join(["=f"] * count) + ",r,~{memory}"
    operands = [Int32(address).ir_value(loc=loc, ip=ip)]
    values = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def store(address: Int32, values: list[Float32], *, loc=None, ip=None) -> None:
    """The reverse of `load`; `wait_for_stores` waits."""
    names = ", ".join(f"${i + 1}" for i in range(len(values)))
    text = f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [$0], {{{names}}};"
    operands = [Int32(address).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)]
    asm(text, "r," + "f," * len(values) + "~{memory}", *operands, loc=loc, ip=ip)


@dsl_user_op
def wait_for_stores(*, loc=None, ip=None) -> None:
    """This thread's stores to tensor memory have happened."""
    asm("tcgen05.wait::st.sync.aligned;", "~{memory}", loc=loc, ip=ip)


@dsl_user_op
def wait(barrier: Int32, phase: Int32, *, loc=None, ip=None) -> None:
    """Wait for a phase of a barrier of this block, at which threads or copies of both blocks may arrive. It may part a warp."""
    text = (
        "{\n\t.reg .pred P1;\n\tLAB_WAIT:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P1, [$0], $1;\n\t"
        "@P1 bra DONE;\n\tbra LAB_WAIT;\n\tDONE:\n\t}"
    )
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (barrier, phase)]
    asm(text, "r,r,~{memory}", *operands, loc=loc, ip=ip)


@dsl_user_op
def arrive(barrier: Int32, is_one: cutlass.Boolean, *, loc=None, ip=None) -> None:
    """Arrive at a barrier of either block, a cluster address, in the threads for which `is_one` holds; no branch."""
    arrive_by("mbarrier.arrive.release.cluster.shared::cluster.b64", barrier, is_one, loc, ip)


@dsl_user_op
def copy_box(
    target: Int32, tensor_map: Int64, column: Int32, row: Int32, index: Int32, barrier: Int32, *, loc=None, ip=None
) -> None:
    """Copy one box of a 3-D tensor map to this block's shared memory; its bytes count at a barrier of either block.

    `barrier` is a cluster address. One thread issues it.
    """
    instruction = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
    copy_box_by(instruction, target, tensor_map, (column, row, index), barrier, loc, ip)
