"""Requests at random arrival, thousands of them: no promise broken at any step, every text the target's, memory flat.

pytest tests/engine -m slow -k soak -q                                    10,000 requests, several minutes
TRTLLM_DSPARK_SOAK_REQUESTS=1000 pytest tests/engine -m slow -k soak -q   fewer, or more
"""

import gc
import os
import random
import time
from dataclasses import dataclass, fields

import pytest
from engine_pair import PAGE
from engine_watch import WatchedEngine, check_all_given_back

from trtllm_dspark.engine.requests import SamplingParams
from trtllm_dspark.engine.scheduler import SchedulerCounts

REQUESTS = int(os.environ.get("TRTLLM_DSPARK_SOAK_REQUESTS", "10000"))
FEW_REQUESTS = 100  # the same in the normal suite
SHORTEST, LONGEST, MOST_NEW = 8, 48, 12
POOL_PAGES = 18  # a request takes up to five
ONE_IN = 100  # texts compared with the target's own
MIB = 2**20
RSS_BOUND, OBJECTS_BOUND = 24 * MIB, 2_000

# round -> how its engine is set; after one of each, memory must be flat
SETTINGS = (
    {"on_pressure": "recompute", "reuse": "joint", "max_batch": 8},
    {"on_pressure": "keep", "reuse": "joint", "max_batch": 6, "prefill_chunk": 24},
    {"on_pressure": "slide", "reuse": "joint", "max_batch": 8, "prefill_chunk": 16},
    {"on_pressure": "recompute", "reuse": "off", "max_batch": 6, "prefill_chunk": 12},
)


@dataclass
class Traffic:
    """What happened. rss, objects: after each round, with nothing in flight."""

    finished: int
    steps: int
    pauses: int
    counts: SchedulerCounts
    sampled: list
    accepted_len: float
    rss: list[int]
    objects: list[int]


def resident_bytes():
    """Of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Users:
    """Prompts that come: new text, text behind one of a few common beginnings, or an earlier conversation that goes on."""

    def __init__(self, source, rng):
        self.source, self.rng = source, rng
        self.beginnings = [prompt[:16] for prompt in source[:4]]
        self.histories = []

    def prompt(self):
        text, kind = self.rng.choice(self.source), self.rng.random()
        if kind < 0.3 and self.histories:
            return [*self.rng.choice(self.histories), *text[:4]]
        if kind < 0.6:
            return [*self.rng.choice(self.beginnings), *text[: self.rng.randint(1, LONGEST - 16)]]
        length = self.rng.randint(SHORTEST, LONGEST)
        return text[-length:]

    def heard(self, completion):
        history = [*completion.prompt, *completion.tokens]
        if len(history) + 4 <= LONGEST:
            self.histories = [*self.histories[-19:], history]


def run_round(engine, users, count, sampled):
    """`count` requests from arrival to end. Returns how often one was paused."""
    rng, asked, arrived, finished, pauses = users.rng, {}, 0, 0, 0
    while finished < count:
        while arrived < count and len(asked) < 2 * engine.max_batch and rng.random() < 0.7:
            prompt, params = users.prompt(), SamplingParams(rng.randint(1, MOST_NEW), ignore_eos=rng.random() < 0.5)
            asked[engine.add(prompt, params)] = prompt, params
            arrived += 1
        for number, request in engine._requests.items():
            if request.paused and rng.random() < 0.3:
                engine.resume(number)
            elif rng.random() < 0.01:
                engine.pause(number)
                pauses += 1
        if asked and rng.random() < 0.02:
            engine.preempt(rng.choice(list(asked)))
        for commit in engine.step():
            if commit.finish is None:
                continue
            completion = engine.completion(commit.request)
            prompt, params = asked.pop(commit.request)
            assert completion.prompt == tuple(prompt) and completion.finish in ("length", "stop_token")
            assert completion.finish == "stop_token" or len(completion.tokens) == params.max_new_tokens
            assert tuple(token for c in completion.commits for token in c.tokens) == completion.tokens
            finished += 1
            users.heard(completion)
            if rng.randrange(ONE_IN) == 0 or not sampled:
                sampled.append((prompt, params, completion))
    return pauses


def soak(pair, requests, seed=0):
    """Rounds of traffic, each by an engine of its own, all on one drafter and one pool."""
    drafter, users = pair.drafter(pool_tokens=POOL_PAGES * PAGE), Users(pair.prompts, random.Random(seed))
    counts, rounds = SchedulerCounts(), len(SETTINGS) * (3 if requests >= 1_000 else 1)
    total = Traffic(0, 0, 0, counts, [], 0.0, [], [])
    extend, propose = drafter.extend, drafter.propose
    accepted = verifications = 0
    for index in range(rounds):
        drafter.extend, drafter.propose = extend, propose  # unwatched, for the next engine to watch
        engine = WatchedEngine(pair.target, drafter, num_drafts=pair.block, **SETTINGS[index % len(SETTINGS)])
        engine.proposals = None
        share = requests * (index + 1) // rounds - requests * index // rounds
        total.pauses += run_round(engine, users, share, total.sampled)
        assert not engine._done
        engine.forget_prefixes()
        check_all_given_back(engine)
        total.finished, total.steps = total.finished + share, total.steps + engine.steps
        for field in fields(SchedulerCounts):
            setattr(counts, field.name, getattr(counts, field.name) + getattr(engine.scheduler.counts, field.name))
        summary = engine.acceptance.summary()
        accepted, verifications = accepted + summary.accepted, verifications + summary.verifications
        del engine, summary
        gc.collect()
        total.rss.append(resident_bytes())
        total.objects.append(len(gc.get_objects()))
    total.accepted_len = 1 + accepted / verifications
    return total


def check(pair, traffic, requests, assert_lossless, say_acceptance, seconds):
    """Every sampled text is the target's own, and reuse and pauses did happen."""
    assert traffic.finished == requests
    for index, (prompt, params, completion) in enumerate(traffic.sampled):
        alone = pair.alone(prompt, params)
        assert_lossless(f"soak sample {index}", [prompt], [alone.tokens], [completion.tokens])
    counts = traffic.counts
    assert min(counts.reused_tokens, traffic.pauses) > 0, counts
    assert traffic.accepted_len > 1.3
    warm = min(len(SETTINGS), len(traffic.rss) - 1)  # the first round after one of each, where there is one
    grown = (traffic.rss[-1] - traffic.rss[warm]) / MIB
    say_acceptance(
        f"soak: {requests} requests, {traffic.steps} steps, {seconds:.0f} s, {len(traffic.sampled)} texts compared, "
        f"{traffic.pauses} pauses, {counts}, memory {traffic.rss[-1] / MIB:.0f} MiB ({grown:+.1f}), "
        f"objects {traffic.objects[-1]} ({traffic.objects[-1] - traffic.objects[warm]:+}), accept_len",
        traffic.accepted_len,
    )


def timed_soak(pair, requests):
    begun = time.perf_counter()
    return soak(pair, requests), time.perf_counter() - begun


def test_short_soak(pair, assert_lossless, say_acceptance):
    traffic, seconds = timed_soak(pair, FEW_REQUESTS)
    check(pair, traffic, FEW_REQUESTS, assert_lossless, say_acceptance, seconds)


@pytest.mark.slow
def test_soak(pair, assert_lossless, say_acceptance):
    traffic, seconds = timed_soak(pair, REQUESTS)
    check(pair, traffic, REQUESTS, assert_lossless, say_acceptance, seconds)
    assert min(traffic.counts.preempted, traffic.counts.slid, traffic.counts.left_out) > 0, traffic.counts
    warm = len(SETTINGS)
    assert traffic.rss[-1] - traffic.rss[warm] < RSS_BOUND, [rss // MIB for rss in traffic.rss]
    assert traffic.objects[-1] - traffic.objects[warm] < OBJECTS_BOUND, traffic.objects


def test_traffic_is_what_its_seed_says(pair):
    first, second = (Users(pair.prompts, random.Random(3)) for _ in range(2))
    prompts = [first.prompt() for _ in range(50)]
    assert prompts == [second.prompt() for _ in range(50)]
    assert {len(prompt) for prompt in prompts} <= set(range(SHORTEST, LONGEST + 1)) and len({len(p) for p in prompts}) > 15
