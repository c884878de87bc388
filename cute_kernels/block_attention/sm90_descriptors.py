"""What the tensor cores read from shared memory in the sm90 schedule, as descriptors. Imports the compiler.

They are made anew where they are used, from an address that the compiler takes for a new one. Kept over a loop they lie in the
registers of each thread, and every product first moves two of them, 64 bits each, to those of the warp.
"""

from types import SimpleNamespace

from cutlass import Int32, cute

from cute_kernels.block_attention import sm90_ptx as ptx
from cute_kernels.block_attention.config import SEGMENT, SM90_BLOCK
from cute_kernels.block_attention.sm90_tiles import CHUNK_BYTES, CHUNKS, HALF


def tensor_at(address: Int32, layout: cute.ComposedLayout, dtype) -> cute.Tensor:
    """Shared memory at an address, as the tensor cores read it."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype), layout.outer)


def score_operands(k: SimpleNamespace) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """Queries, tokens of both buffers, and the tokens' rotary part."""
    whole, value_width, dtype = k.qk.get_slice(0), (CHUNKS - 1) * SEGMENT, k.rP.element_type
    sQ, sK = tensor_at(ptx.again(k.queries_at), k.layout_q, dtype), tensor_at(ptx.again(k.tokens_at), k.layout_k, dtype)
    sKv = cute.local_tile(sK, (SM90_BLOCK, value_width, 2), (0, 0, 0))
    sKr = cute.local_tile(sK, (SM90_BLOCK, SEGMENT, 2), (0, CHUNKS - 1, 0))
    tA = k.qk.make_fragment_A(whole.partition_A(cute.local_tile(sQ, (SM90_BLOCK, value_width), (0, 0))))
    return tA, k.qk.make_fragment_B(whole.partition_B(sKv)), k.qk.make_fragment_B(whole.partition_B(sKr))


def values(k: SimpleNamespace, half: int) -> cute.Tensor:
    """Half of the value columns of both buffers."""
    value_width = (CHUNKS - 1) * SEGMENT
    sKv = cute.local_tile(
        tensor_at(ptx.again(k.tokens_at), k.layout_k, k.rP.element_type), (SM90_BLOCK, value_width, 2), (0, 0, 0)
    )
    sVt = cute.composition(sKv, cute.make_ordered_layout((value_width, SM90_BLOCK, 2), order=(1, 0, 2)))
    return k.pv_own.make_fragment_B(
        k.pv_own.get_slice(0).partition_B(cute.local_tile(sVt, (HALF, SM90_BLOCK, 2), (half, 0, 0)))
    )


def shared_weights(k: SimpleNamespace, stage: int) -> cute.Tensor:
    """Weights of tile `stage` of a pair, which the other warpgroup wrote."""
    address = k.queries_at + (CHUNKS - 1) * CHUNK_BYTES if stage else k.weights_at
    sP = tensor_at(ptx.again(address), k.layout_p, k.rP.element_type)
    return k.pv_other.make_fragment_A(k.pv_other.get_slice(0).partition_A(sP))
