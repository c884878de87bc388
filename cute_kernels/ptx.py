"""Instructions of Hopper that several kernels issue as PTX. Imports the compiler: what runs without it must not import this."""

from typing import Any

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def asm(text: str, constraints: str, *operands: Any, loc: Any = None, ip: Any = None) -> None:
    """An instruction that is issued as it is written and not moved across memory accesses."""
    llvm.inline_asm(
        None,
        list(operands),
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def pure(text: str, constraints: str, result: Any, *operands: Any, loc: Any = None, ip: Any = None) -> Any:
    """An instruction that gives a value, of MLIR type `result`, and does nothing else."""
    return _valued(text, constraints, result, operands, False, loc, ip)


def opaque(text: str, constraints: str, result: Any, *operands: Any, loc: Any = None, ip: Any = None) -> Any:
    """As `pure`, but issued where it stands, each time."""
    return _valued(text, constraints, result, operands, True, loc, ip)


def _valued(text: str, constraints: str, result: Any, operands: Any, stays: bool, loc: Any, ip: Any) -> Any:
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


@dsl_user_op
def wait(barrier: cute.Pointer, phase: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Wait for a phase of a barrier in shared memory. It spins: `mbarrier_wait` of the DSL sleeps between two looks."""
    text = (
        "{\n\t.reg .pred P1;\n\tLAB_WAIT:\n\tmbarrier.try_wait.parity.shared::cta.b64 P1, [$0], $1;\n\t"
        "@P1 bra.uni DONE;\n\tbra.uni LAB_WAIT;\n\tDONE:\n\t}"
    )
    address = barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    asm(text, "r,r,~{memory}", address, Int32(phase).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
