"""Kernels with a fault that the compile gate must see. They compile; none of them is ever launched."""

from typing import Any

from cute_kernels.support import smem_allocator


def _compile(kernel: Any, arch: str, options: str) -> Any:
    from cutlass import Float32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    values = make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, values, stream, options=f"--gpu-arch {arch} --enable-tvm-ffi {options}")


def too_much_shared_memory(arch: str, options: str) -> Any:
    """240,000 bytes: no part has them."""
    return _with_shared_memory(60_000, arch, options)


def as_much_as_the_part_has(arch: str, options: str) -> Any:
    """All of an sm_80's, but for a little; more than an sm_86 has."""
    return _with_shared_memory(160_000 // 4, arch, options)


def _with_shared_memory(elements: int, arch: str, options: str) -> Any:
    from cutlass import Float32, cute

    class Greedy:
        @cute.jit
        def __call__(self, mX: cute.Tensor, stream):
            self.kernel(mX).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, mX: cute.Tensor):
            tidx, _, _ = cute.arch.thread_idx()
            sX = smem_allocator().allocate_tensor(Float32, cute.make_layout((elements,)), 16)
            sX[tidx] = mX[tidx]
            cute.arch.sync_threads()
            mX[tidx] = sX[elements - 1 - tidx]

    return _compile(Greedy(), arch, options)


def spilling(arch: str, options: str) -> Any:
    """128 values alive at once in 1,024 threads, which may have 64 registers each."""
    import cutlass
    from cutlass import Float32, cute

    class Crowded:
        @cute.jit
        def __call__(self, mX: cute.Tensor, stream):
            self.kernel(mX).launch(grid=[1, 1, 1], block=[1024, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, mX: cute.Tensor):
            tidx, _, _ = cute.arch.thread_idx()
            rX = cute.make_rmem_tensor((128,), Float32)
            for i in cutlass.range(128, unroll_full=True):
                rX[i] = mX[tidx + i * 1024]
            cute.arch.sync_threads()
            for i in cutlass.range(128, unroll_full=True):
                mX[tidx + i * 1024] = rX[127 - i]

    return _compile(Crowded(), arch, options)


def serialised(arch: str, options: str) -> Any:
    """Two accumulators of 128 values a thread in flight at once, in 384 threads, which may have 168 registers each."""
    import cutlass
    from cutlass import BFloat16, Float32, cute
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
    from cutlass.utils import hopper_helpers

    k_major, tile, inner = OperandMajorMode.K, (64, 256), 64

    class Greedy:
        @cute.jit
        def __call__(self, mX: cute.Tensor, stream):
            source = warpgroup.OperandSource.SMEM
            mma = hopper_helpers.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), tile, source)
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
            layouts = [cute.tile_to_shape(atom, (size, inner), order=(0, 1)) for size in tile]
            self.kernel(mX, mma, *layouts).launch(grid=[1, 1, 1], block=[384, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, mX: cute.Tensor, mma: cute.TiledMma, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout):
            tidx, _, _ = cute.arch.thread_idx()
            memory = smem_allocator()
            sA = memory.allocate_tensor(BFloat16, layout_a.outer, 1024, swizzle=layout_a.inner)
            sB = memory.allocate_tensor(BFloat16, layout_b.outer, 1024, swizzle=layout_b.inner)
            own = mma.get_slice(tidx % 128)
            tA, tB = mma.make_fragment_A(own.partition_A(sA)), mma.make_fragment_B(own.partition_B(sB))
            rFirst = cute.make_rmem_tensor(own.partition_shape_C(tile), Float32)
            rSecond = cute.make_rmem_tensor(own.partition_shape_C(tile), Float32)
            rFirst.fill(1.0)
            rSecond.fill(1.0)
            warpgroup.fence()
            cute.gemm(mma, rFirst, tA, tB, rFirst)
            cute.gemm(mma, rSecond, tA, tB, rSecond)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            for i in cutlass.range(128, unroll_full=True):
                mX[tidx + i * 384] = rFirst[i] + rSecond[i]

    return _compile(Greedy(), arch, options)


def wrong(arch: str, options: str) -> Any:
    """Does not compile."""
    from cutlass import cute

    class Wrong:
        @cute.jit
        def __call__(self, mX: cute.Tensor, stream):
            self.kernel(mX).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, mX: cute.Tensor):
            mX[0] = mX.no_such_thing

    return _compile(Wrong(), arch, options)
