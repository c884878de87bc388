"""Random traffic over one small drafter, and a checker that notices when a request's context is anything but its own.

A trace: requests arrive (some behind a kept prefix), get pages, run in chunks, stay out of steps, are preempted and computed
again, slide or lose writes when pages are short, and end. After each step the checker knows, position by position, what every
request may read and where each row was written, from its own books. It demands that

    every byte of the pool but the slots just written is as it was, free pages (NaN) and other requests' pages alike;
    every page is held by exactly those who should hold it, and a page that is written by one only;
    what can be read of a request is the newest unbroken run of its rows;
    its drafts, hidden states and logits are, bit for bit, those of the same request run alone.

Features are a function of a request's tokens up to a position. Every projection has one entry a row, so that an output is one
product and cannot be rounded in two ways: what is compared is the context, on any CPU and with any number of threads.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import published
import small_drafts
import torch
import torch.nn.functional as F

from trtllm_dspark.context.draft_context import DraftContext, Segment
from trtllm_dspark.context.pages import NOT_WRITTEN, RequestPages, page_table, slot_vector
from trtllm_dspark.context.pool import ContextPool, PoolLayout
from trtllm_dspark.context.prefix import KeptPrefix, PrefixStore
from trtllm_dspark.model.mla import MLADSparkForCausalLM
from trtllm_dspark.propose import Drafter, Proposal

PAGE, NUM_PAGES, NUM_DRAFTS, TEXT = 4, 11, 2, 40
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 32,
    "draft_vocab_size": 32,
    "target_hidden_size": 16,
    "mask_token_id": 31,
    "markov_rank": 4,
    "block_size": NUM_DRAFTS,
    "enable_confidence_head": False,
    "max_position_embeddings": 64,
}
PRESSURES = ("recompute", "leave out", "slide", "lose")


class Violation(AssertionError):
    """What the checker found."""


def selecting(weight: torch.Tensor) -> torch.Tensor:
    """The same shape with one entry in each row, in columns that differ as long as there are any."""
    rows, columns = weight.shape
    entry = torch.linspace(1.0, 2.0, rows) * (-1.0) ** torch.arange(rows)
    return torch.zeros_like(weight).index_put_((torch.arange(rows), (7 * torch.arange(rows) + 3) % columns), entry)


def exact_model() -> MLADSparkForCausalLM:
    """A draft whose projections select; see above. Norms, embeddings and Markov codes are random."""
    tensors = small_drafts.weights(published.tiny("mla", **SIZES))
    dense = ("embed_tokens.weight", "markov_w1.weight")
    made = {n: selecting(w) if w.dim() == 2 and not n.endswith(dense) else w for n, w in tensors.items()}
    return small_drafts.small_model(tensors=made, **SIZES)


@dataclass(frozen=True, eq=False)
class Text:
    """tokens: of one text. features: [len, n_taps * D], row p a function of tokens[: p + 1]."""

    tokens: tuple[int, ...]
    features: torch.Tensor


def make_texts(width: int, seed: int = 0, count: int = 6) -> list[Text]:
    """Texts that share their beginnings with one another, at every offset within a page."""
    rng, found = random.Random(seed), []
    for index in range(count):
        common = found[rng.randrange(index)].tokens[: rng.randint(1, 24)] if index > 1 else ()
        tokens = common + tuple(rng.randrange(SIZES["vocab_size"]) for _ in range(TEXT - len(common)))
        rows = [_feature(tokens[: p + 1], width) for p in range(TEXT)]
        found.append(Text(tokens, torch.stack(rows)))
    return found


def _feature(tokens: tuple[int, ...], width: int) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(zlib.crc32(bytes(tokens))))


class World:
    """A model, its target's head, texts, and the drafts of every request that ever ran alone.

    Args:
        model: whose drafts; with projections that select where None. head: [V, D], the target's, likewise.
        same: whether a request's drafts and those of its lone run are the same.
    """

    def __init__(
        self,
        model: MLADSparkForCausalLM | None = None,
        head: torch.Tensor | None = None,
        same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
    ) -> None:
        self.same = same
        self.model = model or exact_model()
        self.head = selecting(torch.empty(SIZES["vocab_size"], SIZES["hidden_size"])) if head is None else head
        self.texts = make_texts(self.model.config.num_taps * self.model.config.target_hidden_size)
        self._alone: dict[tuple[Text, int, int, int], Proposal] = {}

    def drafter(self, num_pages: int) -> Drafter:
        layout = PoolLayout.of(self.model.config, page_size=PAGE, dtype=torch.float32)
        context = DraftContext(ContextPool.allocate(layout, num_pages))
        return Drafter(self.model, context, lambda hidden: F.linear(hidden, self.head))

    def alone(self, text: Text, start: int, end: int, length: int) -> Proposal:
        """Drafts behind `length` tokens of a text, positions start .. end-1 readable, in a pool with room and no company."""
        key = (text, start, end, length)
        if key not in self._alone:
            drafter = self.drafter(-(-TEXT // PAGE) + 1)
            drafter.context.admit("alone", length)
            drafter.context.skip_to("alone", start)
            if end > start:
                drafter.extend([Segment("alone", start, end - start)], text.features[start:end])
            drafter.context.skip_to("alone", length)
            self._alone[key] = drafter.propose(["alone"], torch.tensor([text.tokens[length]]), NUM_DRAFTS, keep_logits=True)
        return self._alone[key]


@dataclass
class Books:
    """What a request's context must be. readable: positions that were written and whose pages it still holds."""

    id: int
    text: Text
    prompt: int
    goal: int
    done: int = 0
    lost: int = 0
    readable: set[int] = field(default_factory=set)

    @property
    def run(self) -> tuple[int, int]:
        """The newest unbroken run of readable positions; (0, 0) where there is none."""
        if not self.readable:
            return 0, 0
        start = end = max(self.readable) + 1
        while start - 1 in self.readable:
            start -= 1
        return start, end


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def demand(condition: bool, *said: object) -> None:
    if not condition:
        raise Violation(" ".join(map(str, said)))


class Traffic:
    """One trace.

    Args:
        world: model, texts, lone runs. seed: of everything random. plant: puts a fault into this trace's drafter.
    """

    def __init__(self, world: World, seed: int, plant: "Fault | None" = None) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.drafter = world.drafter(NUM_PAGES)
        self.context = self.drafter.context
        self.store = PrefixStore(self.context, max_prefixes=3)
        self.pressure = self.rng.choice(PRESSURES)
        self.live: list[Books] = []  # oldest first
        self.waiting: list[Books] = []
        self.events: Counter[str] = Counter()
        self._next = 0
        if plant is not None:
            plant(self)

    def run(self, steps: int = 10) -> "Counter[str]":
        """Play the trace to its end. What happened, counted. Raises `Violation`."""
        for _ in range(steps):
            self.step()
        for books in self.live:
            self.context.release(books.id)
            self.context.release(books.id)
        self.live.clear()
        self.store.clear()
        self.check_holders()
        free = self.context.allocator.num_free
        demand(free == NUM_PAGES, f"{free} of {NUM_PAGES} pages came back")
        return self.events

    def step(self) -> None:
        self.poison()
        for _ in range(self.rng.choice((0, 1, 2))):
            self.arrive()
        rows = {books.id: count for books in self.sample(self.live, 0.7) if (count := self.make_room(books))}
        self.extend([(books, rows[books.id]) for books in self.live if books.id in rows])
        self.check_holders()
        if self.rng.random() < 0.6:
            self.propose(self.sample(self.live, 0.7))
        for books in [b for b in self.live if b.done >= b.goal]:
            self.retire(books)

    def sample(self, of: list[Books], share: float) -> list[Books]:
        """Some of them, in any order: the others are left out of this step."""
        chosen = [books for books in of if self.rng.random() < share]
        self.rng.shuffle(chosen)
        self.events["left out"] += len(of) - len(chosen)
        return chosen

    def poison(self) -> None:
        free = torch.tensor(self.context.allocator.free_ids, dtype=torch.int64)
        for view in self.context.pool.views:
            view[free] = torch.nan

    # ------------------------------------------------------------------------------------------------------- lifetime
    def arrive(self) -> None:
        if len(self.live) >= 4:
            return
        if self.waiting and self.rng.random() < 0.8:
            books = self.waiting.pop(0)
        else:
            prompt = self.rng.choice((self.rng.randint(1, 8), self.rng.randint(4, 28)))
            goal = min(prompt + self.rng.randint(0, 6), TEXT - 1)
            books = Books(self._next, self.rng.choice(self.world.texts), prompt, goal)
            self._next += 1
        found = self.store.match(books.text.tokens[: books.prompt])
        free = self.context.allocator.num_free
        if found is not None and free and self.rng.random() < 0.9:
            kept, shared = found
            demand(kept.tokens[:shared] == books.text.tokens[:shared], "a prefix of another text was matched")
            self.context.admit_behind(books.id, kept.pages, kept.start, shared)
            books.done, books.readable = shared, {p for p in kept.state if p < shared}
            self.events["prefix hit"] += 1
            self.events["copied page"] += shared % PAGE > 0
        else:
            self.context.admit(books.id, min(self.rng.choice((0, 0, books.prompt)), free * PAGE))
            if self.rng.random() < 0.1:  # a prefix that only the target has
                books.done = self.rng.randint(0, books.prompt)
                self.context.skip_to(books.id, books.done)
                self.events["skipped prefix"] += 1
        self.live.append(books)

    def make_room(self, books: Books) -> int:
        """Pages for a chunk of the prompt, or for some accepted rows. How many rows come; 0 where it is left out."""
        if books not in self.live:  # preempted a moment ago
            return 0
        left = books.prompt - books.done
        count = min(left, self.rng.choice((1, 3, 5, 12, 24))) if left > 0 else self.rng.randint(1, NUM_DRAFTS + 1)
        count = min(count, books.goal - books.done)
        tokens = books.done + count + self.rng.choice((0, 0, PAGE))  # at times more than the rows need
        while not self.granted(books, self.context.grow, tokens):
            if self.rng.random() < 0.7 and self.store.drop_oldest():
                continue
            others = [b for b in self.live if b is not books]
            if self.pressure == "recompute" and others:
                self.preempt(others[-1])
                continue
            if self.pressure == "leave out":
                self.events["no room"] += 1
                return 0
            if self.pressure == "slide":
                self.events["slid"] += self.granted(books, self.context.slide, tokens)
            break  # what has no page even so is lost
        return count

    def granted(self, books: Books, how: Callable[[Hashable, int], bool], tokens: int) -> bool:
        """Call grow or slide, and write down what it took and gave."""
        pages: RequestPages = self.context.requests[books.id]
        before, free = list(pages.ids), set(self.context.allocator.free_ids)
        done = how(books.id, tokens)
        kept = [(old, new) for old, new in zip(before, pages.ids, strict=False) if old != NOT_WRITTEN]
        demand(len(pages.ids) >= len(before), "a grant shrank", before, pages.ids)
        given = [old for old, new in kept if new == NOT_WRITTEN]
        demand(all(new in (old, NOT_WRITTEN) for old, new in kept), "pages were exchanged", before, pages.ids)
        demand(given == [old for old, _ in kept[: len(given)]], "newer pages went before older ones", before, pages.ids)
        demand(set(pages.held) <= {old for old, _ in kept} | free | set(given), "pages of others were granted", pages.ids)
        demand(done or pages.ids == before, "a grant that failed changed something", before, pages.ids)
        if done and tokens > books.done:
            demand(pages.bound >= tokens, "a grant is short", pages.bound, tokens)
        gone = {p for p in books.readable if pages.ids[p // PAGE] == NOT_WRITTEN}
        books.readable -= gone
        return done

    def preempt(self, books: Books) -> None:
        self.live.remove(books)
        self.context.release(books.id)
        self.waiting.append(Books(books.id, books.text, books.prompt, books.goal))
        self.events["preempted"] += 1

    def retire(self, books: Books) -> None:
        self.live.remove(books)
        if self.rng.random() < 0.4 or books.run[1] != books.done:
            self.context.release(books.id)
            return
        held, count = self.context.detach(books.id), -(-books.done // PAGE)
        self.context.allocator.give_back([page for page in held.ids[count:] if page != NOT_WRITTEN])
        state = frozenset(range(*books.run))
        self.store.keep(KeptPrefix(books.text.tokens[: books.done], held.ids[:count], held.start, state))
        self.events["kept"] += 1

    # ---------------------------------------------------------------------------------------------------------- tokens
    def extend(self, planned: Sequence[tuple[Books, int]]) -> None:
        """All rows of the step in one call; a request's may come as two segments, others' between them."""
        parts: list[list[Segment]] = []
        for books, count in planned:
            cut = self.rng.randint(0, count) if self.rng.random() < 0.2 else count
            cuts = [Segment(books.id, books.done, cut), Segment(books.id, books.done + cut, count - cut)]
            parts.append(cuts if cut < count else cuts[:1])
        segments: list[Segment] = []
        while any(parts):
            segments.append(self.rng.choice([part for part in parts if part]).pop(0))
        books_of = {books.id: books for books in self.live}
        rows = [books_of[s.request].text.features[s.first : s.first + s.count] for s in segments]
        written: set[int] = set()
        for books, count in planned:
            ids = self.context.requests[books.id].ids
            for position in range(books.done, books.done + count):
                if position < len(ids) * PAGE and ids[position // PAGE] != NOT_WRITTEN:
                    written.add(ids[position // PAGE] * PAGE + position % PAGE)
                    books.readable.add(position)
                else:
                    books.lost += 1
                    self.events["lost"] += 1
            books.done += count
        for page in {slot // PAGE for slot in written}:
            demand(self.context.allocator.holders(page) == 1, f"page {page} is written and has several holders")
        before = torch.stack(self.context.pool.views)
        self.drafter.extend(segments, torch.cat([torch.empty(0, self.world.texts[0].features.shape[1]), *rows]))
        self.check_untouched(before, written)
        for books, _ in planned:
            pages = self.context.requests[books.id]
            demand((pages.length, pages.suppressed) == (books.done, books.lost), f"request {books.id} counts", pages, books)

    def propose(self, batch: list[Books]) -> None:
        if not batch:
            return
        view = self.context.view([books.id for books in batch])
        for books, start, end in zip(batch, view.context_start.tolist(), view.context_len.tolist(), strict=True):
            run = books.run
            same = start >= end if run == (0, 0) else (start, end) == run
            demand(same, f"request {books.id} may read {run}, {(start, end)} is said to be readable")
        before = torch.stack(self.context.pool.views)
        anchors = torch.tensor([books.text.tokens[books.done] for books in batch])
        found = self.drafter.propose([books.id for books in batch], anchors, NUM_DRAFTS, keep_logits=True)
        self.check_untouched(before, set())
        demand(bool(found.hidden.isfinite().all()), "a hidden state is not finite")
        for row, books in enumerate(batch):
            alone = self.world.alone(books.text, *books.run, books.done)
            for name in ("tokens", "hidden", "logits"):
                same = self.world.same(getattr(found, name)[row], getattr(alone, name)[0])
                demand(same, f"request {books.id} behind {books.done} tokens has other {name} than alone")
        self.events["drafts"] += len(batch)
        self.events["drafts without a context"] += sum(books.run == (0, 0) for books in batch)

    # ---------------------------------------------------------------------------------------------------------- checks
    def check_untouched(self, before: torch.Tensor, written: set[int]) -> None:
        """Only these slots may differ, and they hold numbers now."""
        after, slots = torch.stack(self.context.pool.views), torch.tensor(sorted(written), dtype=torch.int64)
        same = (bits(before) == bits(after)).all(-1).all(0).flatten()
        same[slots] = True
        demand(bool(same.all()), f"slots {(~same).nonzero().flatten().tolist()} changed, {sorted(written)} were to")
        demand(bool(after.flatten(1, 2)[:, slots].isfinite().all()), "a written row is not finite")

    def check_holders(self) -> None:
        """Pages are held by live requests and kept prefixes, as often as the allocator says; all others are free."""
        allocator, held = self.context.allocator, Counter[int]()
        demand(set(self.context.requests) == {books.id for books in self.live}, "requests", list(self.context.requests))
        for pages in self.context.requests.values():
            held.update(pages.held)
        for prefix in self.store._kept:
            held.update(page for page in prefix.pages if page != NOT_WRITTEN)
        counted = Counter({page: n for page in range(NUM_PAGES) if (n := allocator.holders(page))})
        demand(held == counted, f"pages are held by {dict(held)}, the allocator counts {dict(counted)}")
        free = allocator.free_ids
        demand(sorted(free) == [p for p in range(NUM_PAGES) if p not in held], "free pages", free)


# --- faults: what an engine could do wrong, each put into one trace's own drafter. The lone runs keep theirs.

Fault = Callable[[Traffic], None]


def slot_plus_one(t: Traffic) -> None:
    slots = t.context._slots
    last = t.context.capacity - 1
    t.context._slots = lambda *given: (found := slots(*given)).where(found < 0, (found + 1).clamp(max=last))


def page_given_back_while_shared(t: Traffic) -> None:
    t.context.allocator.share = lambda ids: None


def released_page_kept(t: Traffic) -> None:
    """A leak: what a request gives back is never free again."""
    give_back = t.context.allocator.give_back
    t.context.allocator.give_back = lambda ids: give_back(list(ids)[:-1])


def released_page_reused_early(t: Traffic) -> None:
    """A paused request's pages count as free."""
    grow, allocator = t.context.grow, t.context.allocator

    def grown(request: Hashable, tokens: int) -> bool:
        others = [held for other, held in t.context.requests.items() if other != request and held.held]
        if allocator.num_free or not others:
            return grow(request, tokens)
        allocator.give_back(others[0].held[-1:])
        return grow(request, tokens)

    t.context.grow = grown


def chunk_local_positions(t: Traffic) -> None:
    append, rope = t.context.append, t.world.model.rope

    def local(segments, z, norm_weight, cos, sin, eps):  # type: ignore[no-untyped-def]
        at = [p for s in segments for p in range(s.count)]
        append(segments, z, norm_weight, *rope.angles(torch.tensor(at, dtype=torch.int64)), eps)

    t.context.append = local


def swapped_append_order(t: Traffic) -> None:
    append = t.context.append
    t.context.append = lambda segments, z, *rest: append(segments, z.roll(1, 0), *rest)


def partial_page_shared(t: Traffic) -> None:
    """The last, partly filled page of a prefix is shared and written by whoever continues it."""

    def shared(request: Hashable, pages: Sequence[int], start: int, tokens: int) -> None:
        ids = list(pages[: -(-tokens // PAGE)])
        t.context.allocator.share([page for page in ids if page != NOT_WRITTEN])
        t.context.requests[request] = RequestPages(PAGE, ids, length=tokens, start=start, end=tokens)

    t.context.admit_behind = shared


def absent_is_finished(t: Traffic) -> None:
    """Whoever is left out of a step has lost its context."""
    extend = t.drafter.extend

    def extended(segments: Sequence[Segment], taps: torch.Tensor) -> None:
        for request, held in t.context.requests.items():
            if request not in {s.request for s in segments}:
                held.start = held.end = held.length
        extend(segments, taps)

    t.drafter.extend = extended


def bound_from_the_table(t: Traffic) -> None:
    """Unused entries read 0, and every entry that is not negative counts as a page."""

    def slots(segments: Sequence[Segment], order: list[Hashable], device: torch.device) -> torch.Tensor:
        table = page_table([t.context.requests[request] for request in order], filler=0)
        table = F.pad(table, (0, TEXT // PAGE + 1 - table.shape[1]))
        bound, first = (table >= 0).sum(1) * PAGE, torch.zeros(len(order), dtype=torch.int64)
        rows = torch.tensor([order.index(s.request) for s in segments for _ in range(s.count)], dtype=torch.int64)
        at = torch.tensor([p for s in segments for p in range(s.first, s.first + s.count)], dtype=torch.int64)
        return slot_vector(table, bound, first, rows, at, PAGE)

    t.context._slots = slots


def lost_rows_are_read(t: Traffic) -> None:
    """The advertised length is the request's, whatever was written."""
    view = t.context.view

    def longer(requests, device="cpu"):  # type: ignore[no-untyped-def]
        lengths = torch.tensor([t.context.length(r) for r in requests], dtype=torch.int32)
        return replace(view(requests, device), context_len=lengths)

    t.context.view = longer


def start_ignored(t: Traffic) -> None:
    view = t.context.view

    def from_zero(requests, device="cpu"):  # type: ignore[no-untyped-def]
        found = view(requests, device)
        return replace(found, context_start=torch.zeros_like(found.context_start))

    t.context.view = from_zero


def last_layer_not_written(t: Traffic) -> None:
    views = t.context.pool.views
    extend = t.drafter.extend

    def extended(segments: Sequence[Segment], taps: torch.Tensor) -> None:
        before = views[-1].clone()
        extend(segments, taps)
        views[-1].copy_(before)

    t.drafter.extend = extended


def block_written_to_the_pool(t: Traffic) -> None:
    """A draft step that leaves its own rows behind the context."""
    propose = t.drafter.propose

    def proposed(requests, *rest, **more):  # type: ignore[no-untyped-def]
        for request in requests:
            for slot in t.context.requests[request].slots(t.context.length(request), NUM_DRAFTS):
                if slot >= 0:
                    t.context.pool.views[0].view(-1, t.context.pool.layout.width)[slot] = 0.5
        return propose(requests, *rest, **more)

    t.drafter.propose = proposed


def neighbours_table(t: Traffic) -> None:
    """A request reads the pages of the one before it in the batch, where these hold as much."""
    view = t.context.view

    def rolled(requests, device="cpu"):  # type: ignore[no-untyped-def]
        found = view(requests, device)
        longer = found.context_len.roll(1) >= found.context_len
        whole = (found.context_start == 0) & (found.context_start.roll(1) == 0)
        return replace(found, page_table=found.page_table.roll(1, 0).where((longer & whole)[:, None], found.page_table))

    t.context.view = rolled


def block_at_the_last_row(t: Traffic) -> None:
    """The block begins at the newest context row, not behind it."""
    length = t.context.length
    t.context.length = lambda request: max(length(request) - 1, 0)


FAULTS: dict[str, Fault] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        slot_plus_one,
        page_given_back_while_shared,
        released_page_kept,
        released_page_reused_early,
        chunk_local_positions,
        swapped_append_order,
        partial_page_shared,
        absent_is_finished,
        bound_from_the_table,
        lost_rows_are_read,
        start_ignored,
        last_layer_not_written,
        block_written_to_the_pool,
        neighbours_table,
        block_at_the_last_row,
    )
}
