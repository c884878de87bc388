"""Whole generations through the stand-in host: what it commits with our drafter is what the embedded engine commits."""

import pytest
from engine_pair import FOLDER, Pair
from plugin.host.executor import FLAVOURS, StandIn

from trtllm_dspark.engine.requests import Completion, SamplingParams
from trtllm_dspark.plugin import register

DRAFT = FOLDER / "draft"
PARAMS = SamplingParams(max_new_tokens=32, ignore_eos=True)
ACTIVE = ("1.3.0rc26", "1.3.0rc28", "1.3.0rc29")


def accept_len(completions: list[Completion]) -> float:
    verified = [commit for done in completions for commit in done.commits if not commit.prefill]
    return 1 + sum(commit.accepted for commit in verified) / len(verified)


@pytest.fixture(scope="module")
def embedded(pair: Pair) -> list[Completion]:
    return pair.engine(7).generate(pair.prompts[:3], PARAMS)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("version", ACTIVE)
def test_tokens_and_accept_len_of_the_embedded_engine(version, flavour, host, pair, embedded) -> None:
    host(version)
    assert register().state == "active"
    stand_in = StandIn(pair.target, DRAFT, flavour=flavour).load()
    done = stand_in.generate(pair.prompts[:3], PARAMS)
    assert [d.tokens for d in done] == [d.tokens for d in embedded]
    assert accept_len(done) == accept_len(embedded) > 1.5
