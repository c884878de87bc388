"""The MLA drafter against values that other projects' own code computed; see `tests/data/oracle/README.md`."""

import math
from functools import cache

import pytest
import torch
from mistakes import MISTAKES
from oracle_run import CASES, Values, load_case, load_drafter, run_case
from oracle_tolerance import PROFILES, errors_over_limits

NOT_PRODUCED = ("out.margin",)  # the data's own top-two gaps
NO_FORCED_TOKENS = ("out.tf_logits", "out.tf_probs_t07", "out.tf_confidence_logits")  # multi_step stores none


@cache
def result(profile: str, case: str) -> Values:
    return run_case(case, load_drafter(PROFILES[profile].dtype))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_value_agrees_with_the_peers(profile: str, case: str) -> None:
    expected, got = load_case(case), result(profile, case)
    skipped = NOT_PRODUCED + (NO_FORCED_TOKENS if case == "multi_step" else ())
    assert set(got) == {key for key in expected if "out." in key and not key.endswith(skipped)}
    ratios = errors_over_limits(PROFILES[profile], expected, got)
    assert all(ratio <= 1.0 for ratio in ratios.values()), {key: r for key, r in ratios.items() if r > 1.0}


@pytest.mark.parametrize("case", CASES)
def test_fp32_drafts_equal_the_peers_token_for_token(case: str) -> None:
    expected, got = load_case(case), result("fp32", case)
    chains = [key for key in got if key.endswith("chain_tokens")]
    assert chains and all(torch.equal(got[key], expected[key]) for key in chains)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_size_changes_nothing(page_size: int) -> None:
    drafter = load_drafter(torch.float32, page_size=page_size, num_pages=-(-64 // page_size) + 5)
    ratios = errors_over_limits(PROFILES["fp32"], load_case("multi_step"), run_case("multi_step", drafter))
    assert max(ratios.values()) <= 1.0


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", MISTAKES)
def test_control_a_mistake_is_over_the_tolerance(name: str, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worst = 0.0
    for case in ("ctx037", "ctx000", "multi_step"):
        with monkeypatch.context() as patch:
            drafter = load_drafter(PROFILES[profile].dtype)
            MISTAKES[name](patch, drafter)
            got = run_case(case, drafter)
        hidden = {key: value for key, value in got.items() if key.endswith("final_hidden")}
        worst = max(worst, *errors_over_limits(PROFILES[profile], load_case(case), hidden).values())
        if worst > 1.0:
            break
    assert worst > 1.0, f"{name} reaches only {worst:.2f} of the limit"


def test_control_the_comparison_sees_a_wrong_shape_a_nan_and_a_wrong_token() -> None:
    expected = load_case("ctx037")
    wrong = {
        "out.final_hidden": expected["out.final_hidden"][:, :-1],
        "out.attn_out.0": expected["out.attn_out.0"].clone().index_fill_(0, torch.tensor([6]), math.nan),
        "out.chain_tokens": expected["out.chain_tokens"] + 1,
    }
    assert set(errors_over_limits(PROFILES["fp32"], expected, wrong).values()) == {math.inf}


def test_control_an_ambiguous_token_ends_the_comparison_of_the_chain_there() -> None:
    expected = load_case("ctx037") | {"out.margin": torch.tensor([9.0, 9.0, 1e-4, 9.0, 9.0, 9.0, 9.0])}
    got = {key: expected[key].clone() for key in ("out.chain_tokens", "out.corrected_logits")}
    got["out.chain_tokens"][2:] += 1
    got["out.corrected_logits"][3:] += 9.0
    assert errors_over_limits(PROFILES["fp32"], expected, got) == dict.fromkeys(got, 0.0)
    got["out.corrected_logits"][2] += 9.0  # the step that chose the ambiguous token is still compared
    assert errors_over_limits(PROFILES["fp32"], expected, got)["out.corrected_logits"] > 1.0
