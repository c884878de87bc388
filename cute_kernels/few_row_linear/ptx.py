"""Instructions that the kernel issues as the compiler's own operations. Imports the compiler."""

from typing import Any

from cutlass import Int32, cute
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def prefetch_bytes(source: cute.Pointer, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Ask for bytes of global memory to be brought into L2; both multiples of 16."""
    nvvm.cp_async_bulk_prefetch(source.to_llvm_ptr(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
