"""Conversations: how they are cut from text, how their histories grow, and the command that measures three kinds of reuse."""

import json
import math
import re
from dataclasses import dataclass, field

import pytest

from trtllm_dspark.cli import main
from trtllm_dspark.commands import multi_turn as command
from trtllm_dspark.engine.requests import Commit, Completion, SamplingParams
from trtllm_dspark.engine.scheduler import SchedulerCounts
from trtllm_dspark.evaluation import multi_turn
from trtllm_dspark.evaluation.multi_turn import conversations, run_turns


class Letters:
    """A tokenizer of one token a character: enough to cut text."""

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def joined(talk):
    return [token for said in talk for token in said]


# --- conversations


@pytest.mark.parametrize(("count", "turns", "first", "then"), [(3, 4, 20, 7), (1, 1, 30, 5), (2, 2, 1, 1)])
def test_a_conversation_is_one_text_cut_into_turns(monkeypatch, count, turns, first, then):
    asked = []

    def windows(tokenizer, number, length):
        asked.append((number, length))
        return [list(range(100 * index, 100 * index + length)) for index in range(number)]

    monkeypatch.setattr(multi_turn, "held_out_prompts", windows)
    talks = conversations(Letters(), count, turns, first=first, then=then)
    assert asked == [(count, first + (turns - 1) * then)]
    assert [[len(said) for said in talk] for talk in talks] == [[first] + [then] * (turns - 1)] * count
    for index, talk in enumerate(talks):
        assert joined(talk) == windows(None, index + 1, asked[0][1])[index]


def test_conversations_of_held_out_text_are_the_same_every_time_and_all_different():
    first, second = (conversations(Letters(), 6, 3, first=40, then=10) for _ in range(2))
    assert first == second
    assert len({tuple(joined(talk)) for talk in first}) == 6
    assert all(Letters().decode(talk[-1]).endswith("def") for talk in first)


# --- run_turns, with an engine that only writes down what it is asked


@dataclass
class ScriptedEngine:
    """A mock, for control flow: its answer to a prompt is [-len(prompt), -1], committed as one draft and one more."""

    drafter: object = "a drafter"
    num_drafts: int = 3
    scheduler: object = field(default_factory=lambda: type("Scheduler", (), {"counts": SchedulerCounts(reused_tokens=1_000)})())
    asked: list = field(default_factory=list)

    def generate(self, prompts, params):
        self.asked.append([list(prompt) for prompt in prompts])
        self.scheduler.counts.reused_tokens += 5 * len(prompts)
        return [self.answer(list(prompt)) for prompt in prompts]

    def answer(self, prompt):
        first = Commit(0, 0, (-len(prompt),), 0, 0, True, ("",), None)
        accepted = prompt[0] % 3
        second = Commit(0, 1, (-1,) * (1 + accepted), accepted, 3, False, ("",), "length")
        return Completion(0, tuple(prompt), (*first.tokens, *second.tokens), "", "length", (first, second))


TALKS = [[[1, 2], [3]], [[4], [5, 6]], [[3, 8], [9]]]


def test_every_turn_begins_with_all_before_it():
    engine, told = ScriptedEngine(), []
    result = run_turns(engine, TALKS, SamplingParams(2), progress=told.append)
    assert engine.asked == [
        [[1, 2]],
        [[1, 2, -2, -1, -1, 3]],
        [[4]],
        [[4, -1, -1, -1, 5, 6]],
        [[3, 8]],
        [[3, 8, -2, -1, 9]],
    ]
    assert told == [1] * 6
    assert [completion.prompt for completion in result.completions] == [tuple(prompt) for (prompt,) in engine.asked]
    assert TALKS[0] == [[1, 2], [3]], "what is said is not changed"


def test_a_batch_holds_conversations_side_by_side():
    engine, told = ScriptedEngine(), []
    result = run_turns(engine, TALKS, SamplingParams(2), batch=2, progress=told.append)
    assert engine.asked == [
        [[1, 2], [4]],
        [[1, 2, -2, -1, -1, 3], [4, -1, -1, -1, 5, 6]],
        [[3, 8]],
        [[3, 8, -2, -1, 9]],
    ]
    assert told == [2, 2, 1, 1]
    one_by_one = run_turns(ScriptedEngine(), TALKS, SamplingParams(2))
    assert result.completions == one_by_one.completions, "conversation by conversation, whatever the batch"
    assert (result.accept_len, result.stderr) == (one_by_one.accept_len, one_by_one.stderr)


def test_figures_are_pooled_and_their_error_is_over_conversations():
    result = run_turns(ScriptedEngine(), TALKS, SamplingParams(2))
    assert result.verifications == 6
    assert result.accept_len == pytest.approx((2 + 2 + 1) / 3)  # 1 % 3, 4 % 3 and 3 % 3 drafts accepted
    assert result.stderr == pytest.approx(math.sqrt(1 / 3) / math.sqrt(3))
    assert result.reused_tokens == 30, "of this run, not of what the engine did before"


def test_one_conversation_has_no_error_and_no_drafter_no_acceptance():
    assert math.isnan(run_turns(ScriptedEngine(), TALKS[:1], SamplingParams(2)).stderr)
    alone = run_turns(ScriptedEngine(drafter=None), TALKS, SamplingParams(2))
    assert math.isnan(alone.stderr) and len(alone.completions) == 6


# --- the command, on the tiny pair

SMALL = ["eval", "--multi-turn", "--turns", "2", "--ignore-eos", "--device", "cpu", "--threads", "1"]
FIELDS = {"conversations", "turns", "batch", "num_drafts", "reuse", "lossless", "provenance"}
FIGURES = {"accept_len", "stderr", "verifications", "reused_tokens", "lossless", "compared_turns", "divergences"}


@pytest.fixture
def short(monkeypatch):
    """Fewer tokens than the command takes, for time."""
    for name, value in (("FIRST", 40), ("THEN", 12), ("ANSWER", 8)):
        monkeypatch.setattr(command, name, value)


def measured(path, *more):
    assert main([*SMALL, *more, "--json", str(path)]) == 0
    text = path.read_text()
    assert "NaN" not in text, "JSON has no nan"
    return json.loads(text)


def test_the_command_writes_every_figure(tmp_path, capsys, short):
    said = measured(tmp_path / "out.json", "--prompts", "2")
    assert said.keys() == FIELDS and (said["conversations"], said["turns"], said["batch"]) == (2, 4, 1)
    assert said["lossless"] is True and said["num_drafts"] == 7
    assert list(said["reuse"]) == ["off", "joint", "target_only"]
    for figures in said["reuse"].values():
        assert figures.keys() == FIGURES
        assert figures["lossless"] is True and figures["compared_turns"] == 4
        assert figures["verifications"] > 0 and figures["accept_len"] > 1 and figures["stderr"] >= 0
    reused = {mode: figures["reused_tokens"] for mode, figures in said["reuse"].items()}
    assert reused == {"off": 0, "joint": 2 * 47, "target_only": 2 * 47}, "all of the first turn but the newest token"
    printed = capsys.readouterr().out
    for mode in ("off", "on", "on, not the draft's: fault"):
        assert re.search(rf"^ *{mode} +\d\.\d{{3}} ± \d\.\d{{3}} +\d+ +\d+ +yes", printed, re.MULTILINE), printed
    assert "2 conversations of 2 turns" in printed


def test_one_conversation_in_a_batch_of_two(tmp_path, capsys, short):
    """No standard error over one: null, not a word that no JSON reader knows."""
    said = measured(tmp_path / "out.json", "--prompts", "1", "--batch", "2")
    assert [figures["stderr"] for figures in said["reuse"].values()] == [None] * 3
    assert said["batch"] == 2 and said["reuse"]["joint"]["reused_tokens"] == 47


def test_a_text_that_differs_is_exit_code_1(tmp_path, capsys, short, monkeypatch):
    """Planted: one token of one answer is another."""
    hold, calls = command.run_turns, []

    def wrong(engine, talks, params, **more):
        result = hold(engine, talks, params, **more)
        calls.append(engine)
        if len(calls) == 3:  # target alone, reuse off, then joint
            answer = result.completions[0]
            answer.tokens = (*answer.tokens[:3], (answer.tokens[3] + 1) % 2048, *answer.tokens[4:])
        return result

    monkeypatch.setattr(command, "run_turns", wrong)
    path = tmp_path / "out.json"
    assert main([*SMALL, "--prompts", "1", "--json", str(path)]) == 1
    said = json.loads(path.read_text())
    assert said["lossless"] is False
    assert [figures["lossless"] for figures in said["reuse"].values()] == [True, False, True]
    assert "new token 3" in said["reuse"]["joint"]["divergences"][0]
    assert "NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--json", "{missing}/out.json"], ("--json needs a folder that exists", "Make the folder first")),
        (["--prompts", "100000"], ("were asked for", "Ask for fewer")),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, more, words):
    more = [text.replace("{missing}", str(tmp_path / "missing")) for text in more]
    assert main([*SMALL, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trtllm-dspark: ") and error.count("\n") == 1
    assert all(word in error for word in words)
