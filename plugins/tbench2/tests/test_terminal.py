"""The agent loop: what is executed, what is said back, and why an attempt ends."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from rlcore.types import Budget
from rlcore_tbench2.agent import DEFAULT_SYSTEM_PROMPT, clip, parse_command

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\nls -la\n```", "ls -la"),
        ("Let me look.\n\n```bash\ncat a.txt\n```\nThen more.", "cat a.txt"),
        ("```\npwd\n```", "pwd"),
        ("```sh\nfirst\n```\n```bash\nsecond\n```", "first"),
        ("Run: ```bash\nls\n```", "ls"),
        ("```bash\nls```", "ls"),
        ("```ls```", "ls"),
        ("`````bash\ncat > a.md <<E\n```\ncode\n```\nE\n`````", "cat > a.md <<E\n```\ncode\n```\nE"),
        ("```bash\n\n```", ""),
        ("  echo hi  \n", "echo hi"),
        ("", ""),
        (" \n\t ", ""),
        ("```bash\nrm -rf /wo", ""),
        ("Text ``` and no end", ""),
        ("<think>rm -rf / or\n```bash\nls\n```\n", ""),
        ("TASK_COMPLETE", "TASK_COMPLETE"),
    ],
)
def test_the_command_is_the_first_closed_block_or_the_whole_reply(text, command):
    assert parse_command(text) == command


@pytest.mark.parametrize("length", [0, 100, 4000, 4001, 10**6])
@pytest.mark.parametrize("limit", [16, 100, 4000])
def test_clipped_output_keeps_head_and_tail_within_the_limit(length, limit):
    text = "".join(chr(33 + number % 90) for number in range(length))
    shown = clip(text, limit)
    assert len(shown) <= limit
    if length <= limit:
        assert shown == text
    elif limit > 100:
        assert shown.startswith(text[:20])
        assert shown.endswith(text[-20:])
        assert "left out" in shown


@pytest.mark.fault("LOOP-01")
@pytest.mark.parametrize("reply", ["```bash\nrm -rf /wo", "```bash\ntouch ran\n```", "touch ran", "TASK_COMPLETE"])
async def test_a_reply_cut_by_length_is_never_executed_and_ends_the_attempt(play, make_task, reply):
    task = make_task(
        "#!/bin/sh\n[ -e ran ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    )
    played = await play(task, [(reply, "length"), "touch ran"])
    assert played.trajectory.end == "length"
    assert played.trajectory.info["commands"] == 0
    assert len(played.requests) == 1
    assert played.trajectory.reward == 0


@pytest.mark.fault("LOOP-05")
@pytest.mark.parametrize("reply", ["", "  \n", "<think>only thoughts", "<think>thoughts</think>\n", "```bash\n```"])
async def test_an_empty_reply_ends_as_no_command_after_one_call(play, make_task, reply):
    played = await play(make_task(), [reply, "touch ran"])
    assert played.trajectory.end == "no_command"
    assert len(played.requests) == 1
    assert played.trajectory.reward == 1


@pytest.mark.parametrize("word", ["TASK_COMPLETE", "task_complete", "Task_Complete, I think."])
async def test_the_stop_word_ends_the_attempt_in_any_case(play, make_task, word):
    played = await play(make_task(), ["echo hello", word])
    assert played.trajectory.end == "task_complete"
    assert played.trajectory.info == {"model_calls": 2, "commands": 1, "verifier": played.trajectory.info["verifier"]}


async def test_output_goes_back_as_a_user_message(play, make_task):
    commands = ["echo out; echo err >&2", "true", "cd / && export A=1", "echo $PWD $A", "TASK_COMPLETE"]
    played = await play(make_task(), commands)
    assert played.observations == ["out\nerr", "(no output)", "(no output)", "/workspace"]
    first = played.requests[0].messages
    assert [message.role for message in first] == ["system", "user"]
    assert first[0].content == DEFAULT_SYSTEM_PROMPT
    assert first[1].content == "Do it.\n"
    last = played.requests[-1].messages
    assert [message.content for message in last if message.role == "assistant"] == commands[:-1]


async def test_long_output_is_cut_to_the_limit_and_a_hung_command_is_ended(play, make_task):
    played = await play(
        make_task(),
        ["seq 100000", "echo begun; sleep 60", "exit 3", "TASK_COMPLETE"],
        agent={"command_timeout": 0.5, "show_budget": True, "show_exit_code": True},
    )
    long, hung, failed = played.observations
    assert len(long) <= 4000
    assert long.startswith("1\n2\n")
    assert "100000\n[left: 29 turns, " in long
    assert hung.startswith("begun\n[the command was ended after 0.5 s]\n[left: 28 turns, ")
    assert failed.startswith("(no output)\n[exit code 3]\n")


async def test_a_command_with_a_nul_character_fails_and_the_attempt_goes_on(play, make_task):
    played = await play(make_task(), ["echo a\0b", "TASK_COMPLETE"])
    assert played.observations == ["a command cannot hold a NUL character"]
    assert played.trajectory.reward == 1


@pytest.mark.parametrize(
    ("agent", "turns", "end", "calls"),
    [({"max_turns": 2}, 30, "max_turns", 2), ({}, 3, "max_turns", 3), ({"max_turns": 9}, 1, "max_turns", 1)],
)
async def test_turns_are_bounded_by_the_option_and_by_the_budget(play, make_task, agent, turns, end, calls):
    budget = Budget(tokens_per_turn=100, tokens_per_session=10_000, turns=turns, seconds=30)
    played = await play(make_task(), ["true"] * 9, budget=budget, agent=agent)
    assert (played.trajectory.end, len(played.requests)) == (end, calls)
    assert played.trajectory.info["commands"] == calls


async def test_a_task_that_says_how_many_commands_it_needs_costs_no_further_call(play, make_task):
    toml = '[metadata.rlcore]\nimage_optional = true\nmax_commands = 2\n[environment]\nworkdir = "/workspace"\n'
    task = make_task(toml=toml + 'network_mode = "no-network"\n')
    played = await play(task, ["true", "true"])
    assert (played.trajectory.end, len(played.requests)) == ("task_complete", 2)
    played = await play(task, ["true", "true", "task_complete"], agent={"stop_at_max_commands": False})
    assert (played.trajectory.end, len(played.requests)) == ("task_complete", 3)


@pytest.mark.fault("LOOP-10")
@pytest.mark.parametrize("text", ["--help", "-v fix it", "- item", "@file", "", "a\n\"b\" 'c' $HOME `id` \\n\n\n"])
async def test_an_instruction_is_delivered_verbatim(play, make_task, text):
    played = await play(make_task(files={"instruction.md": text}), ["task_complete"], agent={"system_prompt": ""})
    assert [message.content for message in played.requests[0].messages] == [text]


@pytest.mark.fault("LOOP-11")
async def test_the_same_task_gives_the_same_first_request_every_time(play, make_task):
    task = make_task()
    before = copy.deepcopy(task)
    attempts = [await play(task, ["echo one", "task_complete"])]
    attempts += await asyncio.gather(*(play(task, ["echo two", "task_complete"]) for _ in range(4)))
    firsts = {json.dumps([message.to_dict() for message in played.requests[0].messages]) for played in attempts}
    assert len(firsts) == 1
    assert task == before


@pytest.mark.fault("LOOP-12")
async def test_nothing_of_the_host_or_the_policy_is_in_the_sandbox(play, make_task, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "RLCORE_SECRET", "HF_TOKEN"):
        monkeypatch.setenv(name, "very-secret-value")
    played = await play(make_task(), ["env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'", "task_complete"])
    (seen,) = played.observations
    assert "PATH=" in seen
    assert "very-secret-value" not in seen
    assert "OPENAI" not in seen


@pytest.mark.fault("LOOP-14")
@pytest.mark.parametrize("at", ["prepare", "policy", "command", "verify"])
async def test_a_cancelled_attempt_ends_at_once_and_leaves_no_sandbox(play, make_task, backend, at):
    toml = (
        '[metadata.rlcore]\nimage_optional = true\n[environment]\nworkdir = "/workspace"\nnetwork_mode = "no-network"\n'
    )
    if at == "prepare":
        toml += 'healthcheck = {command = "sleep 60", timeout_sec = 60}\n'
    task = make_task("#!/bin/sh\nsleep 60; echo 1 > /logs/verifier/reward.txt\n", toml=toml)
    replies = {"policy": [("", "hang")], "command": ["sleep 60"]}.get(at, ["task_complete"])
    attempt = asyncio.ensure_future(play(task, replies))
    await asyncio.sleep(1.0)
    attempt.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await attempt
    assert await backend.list({}) == []
