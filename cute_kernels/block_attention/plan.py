"""The work list of a step, made on the device in one small launch and read by all layers.

A batch is a line of costs: per request item_cost, then one for each tile of its context and block. The line is cut into
equal parts; a part begins at a (request, tile) and ends where the next begins. A request that a cut falls into is split,
and its pieces are merged by `combine`. The twin in `cute_kernels.reference.block_attention` says it in a few lines.

From sm_90 on it is launched while the kernel before it ends. It waits for that kernel first of all: the lengths may be new, and
the layers of the step before may still read the list.
"""

from typing import Any

from cute_kernels.arch import is_dependent_launch
from cute_kernels.block_attention.config import Schedule
from cute_kernels.support import smem_allocator

PLAN = "block_attention_plan"
PLAN_THREADS = 256


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Int32, cute

    class BlockAttentionPlan:
        def __init__(self, schedule: Schedule, is_dependent: bool) -> None:
            self.schedule, self.is_dependent = schedule, is_dependent

        @cute.jit
        def cost(self, start: Int32, context: Int32, block_rows: Int32) -> Int32:
            """Of a request: item_cost and its tiles. The twin says the same."""
            tokens = self.schedule.block_tokens
            tiles = Int32(1)
            if cutlass.const_expr(self.schedule.aligned):
                if context > 0:
                    tiles = (start + context + tokens - 1) // tokens - start // tokens + 1
            else:
                tiles = (context + block_rows + tokens - 1) // tokens
            return self.schedule.item_cost + tiles

        @cute.jit
        def __call__(
            self,
            mLength: cute.Tensor,  # (B), int32
            mStart: cute.Tensor,  # (B), int32; any where has_start is 0
            mRequests: cute.Tensor,  # (B, 4): start, context tokens, first part, pieces
            mBoundaries: cute.Tensor,  # (parts + 1, 2): request, tile
            has_start: Int32,
            block_rows: Int32,
            max_context: Int32,
            stream,
        ):
            self.kernel(mLength, mStart, mRequests, mBoundaries, has_start, block_rows, max_context).launch(
                grid=[1, 1, 1], block=[PLAN_THREADS, 1, 1], stream=stream, use_pdl=self.is_dependent
            )

        @cute.kernel
        def kernel(
            self,
            mLength: cute.Tensor,
            mStart: cute.Tensor,
            mRequests: cute.Tensor,
            mBoundaries: cute.Tensor,
            has_start: Int32,
            block_rows: Int32,
            max_context: Int32,
        ):
            if cutlass.const_expr(self.is_dependent):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            tidx, _, _ = cute.arch.thread_idx()
            batch, parts = mLength.shape[0], mBoundaries.shape[0] - 1
            sEnd = smem_allocator().allocate_tensor(Int32, cute.make_layout((PLAN_THREADS,)), byte_alignment=16)
            per_thread = (batch + PLAN_THREADS - 1) // PLAN_THREADS
            first = tidx * per_thread
            last = first + per_thread
            if last > batch:
                last = batch
            own = Int32(0)
            for request in cutlass.range(first, last, unroll=1):
                start, stop = Int32(0), mLength[request]
                if has_start != 0:
                    start = mStart[request]
                if start < 0:
                    start = Int32(0)
                if stop > max_context:
                    stop = max_context
                context = stop - start
                if stop < start:
                    context = Int32(0)
                mRequests[request, 0] = start
                mRequests[request, 1] = context
                own += self.cost(start, context, block_rows)
            # sEnd[t]: cost of all requests of threads 0..t
            sEnd[tidx] = own
            cute.arch.sync_threads()
            for step in cutlass.range_constexpr(PLAN_THREADS.bit_length() - 1):
                gap = 1 << step
                before = Int32(0)
                if tidx >= gap:
                    before = sEnd[tidx - gap]
                cute.arch.sync_threads()
                sEnd[tidx] = sEnd[tidx] + before
                cute.arch.sync_threads()
            total = sEnd[PLAN_THREADS - 1]
            quantum = (total + parts - 1) // parts
            if quantum < self.schedule.min_quantum:
                quantum = Int32(self.schedule.min_quantum)
            begin = sEnd[tidx] - own
            for request in cutlass.range(first, last, unroll=1):
                end = begin + self.cost(mRequests[request, 0], mRequests[request, 1], block_rows)
                first_part = (begin + self.schedule.item_cost) // quantum
                mRequests[request, 2] = first_part
                mRequests[request, 3] = (end - 1) // quantum - first_part + 1
                begin = end
            for part in cutlass.range(tidx, parts + 1, PLAN_THREADS, unroll=1):
                target = part * quantum
                found, tile = batch, Int32(0)
                if target < total:
                    owner = Int32(0)  # the thread whose requests hold the target
                    for step in cutlass.range_constexpr(PLAN_THREADS.bit_length() - 1):
                        half = PLAN_THREADS >> (step + 1)
                        if sEnd[owner + half - 1] <= target:
                            owner += half
                    begin = Int32(0)
                    if owner > 0:
                        begin = sEnd[owner - 1]
                    found = owner * per_thread
                    for _ in cutlass.range(per_thread - 1, unroll=1):
                        if found < batch - 1:
                            end = begin + self.cost(mRequests[found, 0], mRequests[found, 1], block_rows)
                            if end <= target:
                                begin = end
                                found += 1
                    tile = target - begin - self.schedule.item_cost
                    if tile < 0:
                        tile = Int32(0)
                mBoundaries[part, 0] = found
                mBoundaries[part, 1] = tile

    return BlockAttentionPlan


def compile_for(schedule: Schedule, arch: str, options: str = "") -> Any:
    """Compile for an architecture; needs no GPU. `schedule`: whose tiles are counted. `options`: more flags of the compiler."""
    from cutlass import Int32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    batch, bounds = cute.sym_int(), cute.sym_int()
    return cute.compile(
        kernel_class()(schedule, is_dependent_launch(arch)),
        make_fake_tensor(Int32, (batch,), stride=(1,), assumed_align=4),
        make_fake_tensor(Int32, (batch,), stride=(1,), assumed_align=4),
        make_fake_tensor(Int32, (batch, 4), stride=(4, 1), assumed_align=16),
        make_fake_tensor(Int32, (bounds, 2), stride=(2, 1), assumed_align=8),
        Int32(0),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )
