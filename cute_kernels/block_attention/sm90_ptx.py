"""Instructions that the sm90 schedule issues as PTX. Imports the compiler."""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_kernels.ptx import arrive_by, asm, copy_box_by, opaque


@dsl_user_op
def copy_box(
    target: Int32, tensor_map: Int64, column: Int32, row: Int32, index: Int32, barrier: Int32, *, loc=None, ip=None
) -> None:
    """Copy one box of a 3-D tensor map to shared memory, addresses as numbers; one thread issues it."""
    instruction = "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    copy_box_by(instruction, target, tensor_map, (column, row, index), barrier, loc, ip)


@dsl_user_op
def store_box(tensor_map: Int64, column: Int32, row: Int32, index: Int32, source: Int32, *, loc=None, ip=None) -> None:
    """Copy shared memory to one box of a 3-D tensor map; rows past the tensor are not written. One thread issues it."""
    ints = [Int32(x).ir_value(loc=loc, ip=ip) for x in (column, row, index, source)]
    text = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3}], [$4];"
    asm(text, "l,r,r,r,r,~{memory}", Int64(tensor_map).ir_value(loc=loc, ip=ip), *ints, loc=loc, ip=ip)


@dsl_user_op
def wait_until_read(*, loc=None, ip=None) -> None:
    """Wait until all that this thread has stored from shared memory was read there."""
    asm("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;", "~{memory}", loc=loc, ip=ip)


@dsl_user_op
def again(value: Int32, *, loc=None, ip=None) -> Int32:
    """The same number, but a compiler takes it for a new one: what is computed from it is not kept from one use to the next."""
    return Int32(opaque("mov.b32 $0, $1;", "=r,r", T.i32(), Int32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def arrive(barrier: cute.Pointer, is_one: cutlass.Boolean, *, loc=None, ip=None) -> None:
    """Arrive at a barrier in shared memory, in the threads for which `is_one` holds; no branch."""
    arrive_by("mbarrier.arrive.shared::cta.b64", barrier.toint(loc=loc, ip=ip), is_one, loc, ip)


@dsl_user_op
def ask_ahead(address: Int64, size: Int32, *, loc=None, ip=None) -> None:
    """Ask for bytes of global memory into L2; both are multiples of 16."""
    asm(
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        "l,r,~{memory}",
        Int64(address).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def ask_line_ahead(address: Int64, *, loc=None, ip=None) -> None:
    """Ask for the line that an address is in into L2."""
    asm("prefetch.global.L2 [$0];", "l,~{memory}", Int64(address).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def ask_box_ahead(tensor_map: Int64, column: Int32, row: Int32, index: Int32, *, loc=None, ip=None) -> None:
    """Ask for one box of a 3-D tensor map into L2."""
    ints = [Int32(x).ir_value(loc=loc, ip=ip) for x in (column, row, index)]
    text = "cp.async.bulk.prefetch.tensor.3d.L2.global.tile [$0, {$1, $2, $3}];"
    asm(text, "l,r,r,r,~{memory}", Int64(tensor_map).ir_value(loc=loc, ip=ip), *ints, loc=loc, ip=ip)


@dsl_user_op
def copy_to_peer(target: Int32, source: Int32, size: Int32, barrier: Int32, *, loc=None, ip=None) -> None:
    """Copy this block's shared memory to another block's, whose barrier counts the bytes; one thread issues it."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (target, source, size, barrier)]
    text = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(text, "r,r,r,r,~{memory}", *operands, loc=loc, ip=ip)


@dsl_user_op
def arrive_at_peer(barrier: Int32, is_one: cutlass.Boolean, *, loc=None, ip=None) -> None:
    """Arrive at a barrier of another block of the cluster, in the threads for which `is_one` holds; no branch.

    It orders nothing: with release at the cluster's scope every thread would wait here for all that the block has stored.
    """
    arrive_by("mbarrier.arrive.relaxed.cluster.shared::cluster.b64", barrier, is_one, loc, ip)
