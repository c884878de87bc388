"""What both schedules are compiled against: the operands of a launch, as their kernel classes list them."""

from typing import Any

from cute_kernels.block_attention.config import VECTOR, BlockAttentionConfig


def fake_operands(config: BlockAttentionConfig, piece_width: int) -> tuple[Any, ...]:
    """Tensors without memory, sizes and strides left open where a launch may choose them. Imports the compiler.

    Args:
        config: of the kernel. piece_width: fp32 values in a row of the pieces' buffer.
    """
    import cutlass
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    dtype = cutlass.BFloat16 if config.dtype == "bfloat16" else cutlass.Float16
    batch, rows, block_rows, pages, max_pages, slots, lines, bounds = (cute.sym_int() for _ in range(8))
    width, value = config.width, config.value_width

    def stride() -> Any:
        return cute.sym_int64(divisibility=VECTOR)

    return (
        make_fake_tensor(dtype, (batch, rows, width), stride=(stride(), stride(), 1), assumed_align=16),
        make_fake_tensor(dtype, (batch, block_rows, width), stride=(stride(), stride(), 1), assumed_align=16),
        make_fake_tensor(dtype, (pages, config.page_size, width), stride=(stride(), width, 1), assumed_align=16),
        make_fake_tensor(Int32, (batch, max_pages), stride=(cute.sym_int64(), 1), assumed_align=4),
        make_fake_tensor(Int32, (batch, 4), stride=(4, 1), assumed_align=16),
        make_fake_tensor(Int32, (bounds, 4), stride=(4, 1), assumed_align=16),
        make_fake_tensor(dtype, (batch, rows, value), stride=(stride(), value, 1), assumed_align=16),
        make_fake_tensor(Float32, (batch, rows), stride=(cute.sym_int64(), 1), assumed_align=4),
        make_fake_tensor(Float32, (slots, lines, piece_width), stride=(stride(), piece_width, 1), assumed_align=16),
        make_fake_tensor(Float32, (slots, rows), stride=(cute.sym_int64(), 1), assumed_align=4),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
