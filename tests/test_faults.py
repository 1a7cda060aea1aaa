"""Faults of real systems that rlcore must not have: which test protects against each.

Run ``pytest tests/test_faults.py -s`` to read the table.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FAULTS = {
    "LOSS-14": "An infra-failed rollout (reward None/NaN) is scored as 0 or poisons its whole group",
    "LOSS-01": "Very unlikely tokens still receive a sizeable correction weight",
    "LOSS-03": "NaN in padding or tool-output positions leaks into the loss",
    "LOSS-12": "Group of one (others failed) gives NaN advantage",
    "LOSS-15": "A rollout split into several rows is counted several times in the group baseline",
    "LOSS-25": "In async mode clipping never fires; staleness is ignored",
    "LOSS-06": "The result depends on how the batch was split",
    "LOSS-13": "A group with identical rewards is treated as informative",
    "LOSS-04": "A batch (or micro-batch, or one rank's shard) with no trainable token crashes or yields NaN",
    "LOSS-09": "Rejection (masked IS / veto) silently scales the gradient down",
    "LOSS-19": "Importance ratios are noisy although both engines agree",
    "LOSS-21": "Earlier turns silently get advantage 0",
    "LOSS-10": "Sequence-level loss multiplied by token-level weights gives a nonsense matrix by broadcasting, no error",
    "LOSS-18": "'group' and 'batch' normalisation behave as each other",
    "LOSS-22": "Padding content changes the sequence-level loss",
    "LOSS-16": "Rows of one rollout carry different rewards and one is picked arbitrarily",
    "LOSS-24": "KL penalty has no effect (or gradient flows through the reference/behaviour scores)",
    "LOSS-27": "Hang: one rank skips a collective because it has no local tokens",
    "MASK-01": "Trained token ids differ from sampled ids after turn 1",
    "MASK-02": "Tool output forges a role boundary or ends the turn",
    "MASK-03": "Reasoning templates delete earlier thinking, so history no longer matches what was sampled",
    "MASK-07": "A reply without token log-probs (abort, proxy, wrong flag) gets re-tokenised with fake log-probs",
    "MASK-17": "NaN/null/-inf log-prob from the engine becomes 0.0 or crashes JSON parsing",
    "MASK-04": "Template glue is trained as if the model produced it",
    "MASK-05": "Two tool results in one turn render differently when tokenised one by one",
    "MASK-09": "Finished answers are discarded as overlong, or cut ones kept",
    "MASK-11": "Tool output pushes the row past the context budget; arrays desync when trimmed",
    "MASK-10": "Cut responses are labelled complete",
    "MASK-15": "Few-shot assistant messages inside the prompt are trained",
    "MASK-19": "Resumed (partial) generation exceeds or forgets its budget and mask",
    "MASK-12": "Prefix reuse silently falls back to re-tokenising",
    "CLI-01": "Cancelled rollouts keep generating; engine slots stay busy and the next weight pause stalls",
    "CLI-03": "A lost reply makes the resend be executed twice: duplicate turn, forked trajectory, or double optimiser step",
    "CLI-06": "A reply cut by an abort is treated as the model's final answer",
    "CLI-05": "Negative or zero max_tokens sent to the engine",
    "CLI-10": "Error replies are taken as success",
    "CLI-13": "Requests slip in between abort and weight swap and run across it",
    "CLI-19": "A half-open connection hangs a rollout (or the admin path) forever",
    "CLI-08": "Engine traffic goes through a corporate proxy",
    "CLI-09": "Proxy in front of the engine corrupts replies",
    "CLI-18": "n*n samples per prompt",
    "CLI-07": "Throughput plateaus at 100 concurrent rollouts; or PoolTimeout counted as engine failure",
    "CLI-14": "Prefix cache is useless across turns",
    "CLI-15": "Load balancing sends most traffic to one engine",
    "LOOP-01": "A half-written command is executed",
    "LOOP-02": "Malformed tool arguments kill the rollout",
    "LOOP-05": "Empty reply loops forever or crashes",
    "LOOP-11": "Second epoch sees a polluted prompt",
    "LOOP-14": "Cancellation is swallowed or leaves no answer",
    "LOOP-12": "Programs started by the agent call the policy endpoint and appear as turns",
    "LOOP-04": "Only the first of several tool calls is answered; next request is invalid",
    "LOOP-07": "Tool-call budget counted in turns",
    "LOOP-10": "A task text beginning with a dash is read as a CLI flag",
    "SBX-01": "exec never returns although the command ended",
    "SBX-09": "Sandboxes leak when cancel/failure hits between create and registration",
    "SBX-05": "Binary output crashes the rollout",
    "SBX-07": "Huge output exhausts host memory or context",
    "SBX-08": "Interactive command blocks the full timeout or eats the operator's terminal",
    "SBX-04": "Provider timeout not honoured (fires late, or a fixed 60 s cap)",
    "SBX-10": "Teardown error replaces the reward or hides the original exception",
    "SBX-19": "Quota and rate errors become reward 0 or a retry storm",
    "SBX-20": "Idle auto-stop kills a live trial, or 0 means never reclaim and orphans pile up",
    "SBX-14": "Second run of the same step returns the first run's result",
    "SBX-21": "Exit codes are misread: user's own 124/137 as timeout, OOM/box death as agent failure",
    "SBX-15": "Crash int('') while polling for completion",
    "SBX-16": "Paths/commands with quotes or spaces break",
    "SBX-18": "Local sandbox inherits the trainer's venv; fixed names in shared /tmp collide",
    "SBX-23": "Docker address pool runs out after some hundred trials",
    "SBX-22": "Timeout type/values rejected or infinite",
    "ASY-09": "Background worker dies; main loop waits for ever",
    "ASY-05": "Run hangs or crashes on the last step(s)",
    "ASY-13": "Fresh run trains on the previous run's rollouts/weights",
    "ASY-04": "Staleness bound off by one, or ignores time spent in the queue",
    "ASY-06": "Aborted samples are trained, or their prompts vanish",
    "ASY-11": "Slow (hard) tasks never reach training",
    "ASY-14": "Whole batch failed -> crash or silent NaN step",
    "ASY-10": "Weights pushed twice for one version, or update half-cancelled",
    "ASY-12": "Results of two in-flight rollouts of the same task are swapped",
    "ASY-17": "Data runs out / resume leaves a hole -> deadlock",
    "ASY-07": "Throughput collapses after a pause",
    "CKP-01": "Kill during save leaves a corrupt newest checkpoint and the run can't restart",
    "CKP-04": "Resumed run repeats or skips data, or reshuffles",
    "CKP-08": "JSONL of trajectories is 'corrupt' on resume",
    "CKP-02": "Disk-full with keep=1 loses everything",
    "CKP-10": "Last step not saved; eval-metric-based keep misbehaves",
    "CKP-06": "Start step overwritten by 0; pre-train eval missed or repeated",
    "CKP-09": "Resume with a changed task set breaks or silently misaligns",
    "CFG-02": "--load sets --load-debug-...",
    "CFG-05": "Typos are ignored",
    "CFG-08": "--clean deletes the parent or a whole output root",
    "CFG-01": "lr: 1e-6 arrives as a string",
    "CFG-04": "Values change when config is written and re-read",
    "CFG-07": "Slice path@[-100:] breaks or is ignored",
    "CFG-10": "Misc. CLI crashes",
    "PLG-01": "One broken installed package kills every command",
    "PLG-05": "All environments tag rows with the last one's name",
    "PLG-07": "Odd reward types crash or are cast silently",
    "PLG-06": "functools.partial / callable object / async function refused or crash in logging",
    "PLG-03": "owner/name@version or dashes don't resolve",
    "SYN-01": "Log-probs are off after every update",
    "SYN-03": "Engines stay paused for ever",
    "SYN-06": "One of several engines keeps old weights and still serves",
    "SYN-05": "Engine reports a new version though weights did not (fully) arrive",
    "SYN-07": "Rollout pool stuck at version 0",
    "SYN-09": "Aborting stale requests during/after the pause crashes the engine",
    "SYN-10": "Wrong values or crash for some tensors",
    "DAT-01": "Time-outs bias rewards: verified work thrown away, or grader time-outs scored as 0",
    "DAT-03": "Reward hacking through the result channel",
    "DAT-05": "Reward file parsing is brittle",
    "DAT-06": "Eval drops the tail or counts items twice",
    "DAT-07": "Old task metadata isn't understood",
    "DAT-09": "Null/NaN columns, mixed rows or filtering change order or crash",
    "OBS-08": "Writing a trace with a lone surrogate or NUL raises and loses the rollout",
    "OBS-02": "Global max/mean wrong",
    "OBS-03": "Missing measurements logged as 0",
    "OBS-07": "Log line crashes or is invalid JSON",
    "OBS-04": "Mismatch metrics mislead",
    "OBS-09": "A crash loses the step's metrics; tracker errors kill the run or mask the cause",
    "OBS-10": "Model text breaks the console logger",
}

NATIVE_TOOL_CALLS = "not applicable: the agent loop reads commands from text; no native tool calls yet"

ONE_ENGINE = "not yet: a run has one engine; a trainer with several will need it"

NOT_TESTED = {
    "SYN-06": ONE_ENGINE,
    "LOOP-02": NATIVE_TOOL_CALLS,
    "LOOP-04": NATIVE_TOOL_CALLS,
    "LOOP-07": NATIVE_TOOL_CALLS,
}
"""Why a fault has no test: ``not yet: …`` or ``not applicable: …``."""


def by_fault() -> dict[str, list[str]]:
    """Names of the tests that carry ``@pytest.mark.fault("CASE")``, by case, read from their sources."""
    found = defaultdict(list)
    folders = ["core/tests", "tests", *(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins*/*/tests"))]
    for path in sorted(path for folder in folders for path in (ROOT / folder).glob("**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for case in cases_of(node.decorator_list):
                    found[case].append(f"{path.relative_to(ROOT)}::{node.name}")
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
            ):
                for case in cases_of(list(ast.walk(node.value))):
                    found[case].append(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.Call) and is_param(node):
                for keyword in node.keywords:
                    if keyword.arg == "marks":
                        for case in cases_of(list(ast.walk(keyword.value))):
                            found[case].append(f"{path.relative_to(ROOT)} (a parameter)")
    return found


def is_param(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "param"


def cases_of(nodes: list[ast.expr] | list[ast.AST]) -> list[str]:
    return [
        str(argument.value)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fault"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    ]


def test_every_fault_has_a_test_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = by_fault()
    rows = [(case, found.get(case) or [NOT_TESTED.get(case, "MISSING")]) for case in FAULTS]
    with capsys.disabled():
        print()
        for case, tests in rows:
            print(f"{case:8} {FAULTS[case]}")
            for test in tests:
                print(f"         {test}")
    assert not [case for case, tests in rows if tests == ["MISSING"]]
    assert not set(found) - set(FAULTS), "a test is marked with a fault that is not in the list"
    assert not set(found) & set(NOT_TESTED), "a fault has a test and a reason for having none"
    assert all(reason.startswith(("not yet: ", "not applicable: ")) for reason in NOT_TESTED.values())
