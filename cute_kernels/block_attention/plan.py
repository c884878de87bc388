"""The work list of a step, made on the device in one small launch and read by all layers.

A part begins at a (request, tile) and ends where the next begins. A request that a part's beginning falls into is split, and
its pieces are merged by `combine`. There are two lists; the twin in `cute_kernels.reference.block_attention` says them in a few
lines.

- Separate: every request has parts of its own and is cut evenly among them, so that no part pays twice for starting on a
  request. Taken where a part then costs hardly more than quantum + item_cost, which is what a part of the other list may cost.
  Where the schedule joins two parts of a request itself, and two for each are as good, every request gets two.
- Contiguous: the batch is a line of costs, per request item_cost, then one for each tile of its context and block. The line is
  cut every quantum, wherever that falls.

From sm_90 on it is launched while the kernel before it ends. It waits for that kernel first of all: the lengths may be new, and
the layers of the step before may still read the list.
"""

from typing import Any

from cute_kernels.arch import is_dependent_launch
from cute_kernels.block_attention.config import Schedule, may_join
from cute_kernels.support import smem_allocator

PLAN = "block_attention_plan"
WARP = 32
PLAN_THREADS = 256  # each owns one request of a separate list; of more requests the list is contiguous
PLAN_WARPS = PLAN_THREADS // WARP  # each tries one length of pieces
SLACK = 32  # of so many tiles one more is paid for fewer pieces to merge


def kernel_class() -> type:
    """The kernel; imports the compiler."""
    import cutlass
    from cutlass import Int32, cute

    class BlockAttentionPlan:
        def __init__(self, schedule: Schedule, is_dependent: bool) -> None:
            self.schedule, self.is_dependent = schedule, is_dependent

        @cute.jit
        def count(self, start: Int32, context: Int32, block_rows: Int32) -> Int32:
            """Tiles of a request. The twin says the same."""
            tokens = self.schedule.block_tokens
            tiles = Int32(1)
            if cutlass.const_expr(self.schedule.aligned):
                if context > 0:
                    tiles = (start + context + tokens - 1) // tokens - start // tokens + 1
            else:
                tiles = (context + block_rows + tokens - 1) // tokens
            return tiles

        @cute.jit
        def sum_up_to(self, value: Int32, sWarpSum: cute.Tensor) -> Int32:
            """Of the values of threads 0 to this one. All threads call it; `sWarpSum` is used once in a launch."""
            tidx, _, _ = cute.arch.thread_idx()
            warp, lane = tidx // WARP, tidx % WARP
            for step in cutlass.range_constexpr(WARP.bit_length() - 1):
                before = cute.arch.shuffle_sync_up(value, 1 << step)
                if lane >= 1 << step:
                    value += before
            if lane == WARP - 1:
                sWarpSum[warp] = value
            cute.arch.sync_threads()
            for other in cutlass.range_constexpr(PLAN_WARPS - 1):
                if other < warp:
                    value += sWarpSum[other]
            return value

        @cute.jit
        def longest_piece(self, sTiles: cute.Tensor, sTried: cute.Tensor, batch: Int32, parts: Int32, quantum: Int32) -> Int32:
            """The least number of tiles whose pieces fit the parts; 0 where none is found. All threads call it."""
            tidx, _, _ = cute.arch.thread_idx()
            warp, lane = tidx // WARP, tidx % WARP
            least = quantum - self.schedule.item_cost  # with less, the pieces cost more than the parts can hold
            if least < self.schedule.min_quantum:
                least = Int32(self.schedule.min_quantum)
            tried, pieces = least + warp, Int32(0)
            for request in cutlass.range(lane, batch, WARP, unroll=1):
                pieces += (sTiles[request] + tried - 1) // tried
            pieces = cute.arch.warp_reduction_sum(pieces)
            if lane == 0:
                sTried[warp] = pieces
            cute.arch.sync_threads()
            longest = Int32(0)
            for i in cutlass.range_constexpr(PLAN_WARPS - 1, -1, -1):
                if sTried[i] <= parts and least + i <= quantum + quantum // SLACK:
                    longest = least + i
            return longest

        @cute.jit
        def most_tiles(self, sTiles: cute.Tensor, batch: Int32) -> Int32:
            """Of a request."""
            tidx, _, _ = cute.arch.thread_idx()
            most = Int32(0)
            for request in cutlass.range(tidx % WARP, batch, WARP, unroll=1):
                if sTiles[request] > most:
                    most = sTiles[request]
            return cute.arch.warp_reduction(most, lambda x, y: cutlass.max(x, y))

        @cute.jit
        def __call__(
            self,
            mLength: cute.Tensor,  # (B), int32
            mStart: cute.Tensor,  # (B), int32; any where has_start is 0
            mRequests: cute.Tensor,  # (B, 4): start, context tokens, first part, pieces; -1: two parts are joined
            mBoundaries: cute.Tensor,  # (parts + 1, 4): request, tile, the request's start and context tokens
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
            allocator = smem_allocator()
            of_threads, of_warps = cute.make_layout((PLAN_THREADS,)), cute.make_layout((PLAN_WARPS,))
            sEnd = allocator.allocate_tensor(Int32, of_threads, byte_alignment=16)
            sTiles = allocator.allocate_tensor(Int32, of_threads, byte_alignment=16)
            sStart = allocator.allocate_tensor(Int32, of_threads, byte_alignment=16)  # of a thread's last request: its only one
            sContext = allocator.allocate_tensor(Int32, of_threads, byte_alignment=16)  # where all have their own
            sCosts = allocator.allocate_tensor(Int32, of_warps, byte_alignment=16)
            sPieces = allocator.allocate_tensor(Int32, of_warps, byte_alignment=16)
            sTried = allocator.allocate_tensor(Int32, of_warps, byte_alignment=16)
            per_thread = (batch + PLAN_THREADS - 1) // PLAN_THREADS
            first = tidx * per_thread
            last = first + per_thread
            if last > batch:
                last = batch
            own, tiles = Int32(0), Int32(0)
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
                mRequests[request, 0], mRequests[request, 1] = start, context
                sStart[tidx], sContext[tidx] = start, context
                tiles = self.count(start, context, block_rows)
                own += self.schedule.item_cost + tiles
            end = self.sum_up_to(own, sCosts)
            sEnd[tidx], sTiles[tidx] = end, tiles
            cute.arch.sync_threads()
            total = sEnd[PLAN_THREADS - 1]
            quantum = (total + parts - 1) // parts
            if quantum < self.schedule.min_quantum:
                quantum = Int32(self.schedule.min_quantum)
            longest = Int32(0)  # tiles of a piece of the separate list; 0: contiguous
            is_joined = False
            if batch <= parts and batch <= PLAN_THREADS:
                longest = self.longest_piece(sTiles, sTried, batch, parts, quantum)
                if cutlass.const_expr(self.schedule.joins):
                    if may_join(batch, parts):
                        half = (self.most_tiles(sTiles, batch) + 1) // 2
                        if half <= quantum + quantum // SLACK:
                            longest, is_joined = half, True
            stride = quantum  # of targets on the line that sEnd measures
            if longest > 0:
                own = (tiles + longest - 1) // longest
                pieces = own
                if is_joined and tidx < batch:
                    own = Int32(2)
                    if tiles > 1:
                        pieces = Int32(-1)
                end = self.sum_up_to(own, sPieces)
                sEnd[tidx] = end
                if tidx < batch:
                    mRequests[tidx, 2], mRequests[tidx, 3] = end - own, pieces
                cute.arch.sync_threads()
                total, stride = sEnd[PLAN_THREADS - 1], Int32(1)
            else:
                begin = end - own
                for request in cutlass.range(first, last, unroll=1):
                    end = begin + self.schedule.item_cost + self.count(mRequests[request, 0], mRequests[request, 1], block_rows)
                    first_part = (begin + self.schedule.item_cost) // quantum
                    mRequests[request, 2] = first_part
                    mRequests[request, 3] = (end - 1) // quantum - first_part + 1
                    begin = end
            for part in cutlass.range(tidx, parts + 1, PLAN_THREADS, unroll=1):
                target = part * stride
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
                    if longest > 0:
                        own = sEnd[owner] - begin
                        tile = ((part - begin) * sTiles[owner] + own - 1) // own
                        if tile == sTiles[owner]:  # the second part of a request of one tile: it is empty
                            found += 1
                            tile = Int32(0)
                    else:
                        for _ in cutlass.range(per_thread - 1, unroll=1):
                            if found < batch - 1:
                                tiles = self.count(mRequests[found, 0], mRequests[found, 1], block_rows)
                                if begin + self.schedule.item_cost + tiles <= target:
                                    begin += self.schedule.item_cost + tiles
                                    found += 1
                        tile = target - begin - self.schedule.item_cost
                        if tile < 0:
                            tile = Int32(0)
                start, context = Int32(0), Int32(0)
                if found < batch:
                    if per_thread == 1:
                        start, context = sStart[found], sContext[found]
                    else:
                        start, context = mRequests[found, 0], mRequests[found, 1]
                mBoundaries[part, 0], mBoundaries[part, 1] = found, tile
                mBoundaries[part, 2], mBoundaries[part, 3] = start, context

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
        make_fake_tensor(Int32, (bounds, 4), stride=(4, 1), assumed_align=16),
        Int32(0),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch {arch} --enable-tvm-ffi {options}",
    )
