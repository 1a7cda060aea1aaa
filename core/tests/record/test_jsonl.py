"""JSON lines survive what runs put into them and how runs end."""

import json
import threading
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from rlcore.record.jsonl import JsonlWriter, dumps, plain, read_jsonl
from rlcore.types import FinishReason, Message


def strict(text: str) -> object:
    def refuse(literal: str) -> object:
        raise AssertionError(f"not JSON: {literal}")

    return json.loads(text, parse_constant=refuse)


class Scalar:
    """Behaves as a torch scalar does."""

    def tolist(self) -> float:
        return 1.0


@pytest.mark.fault("OBS-07")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(2.5), 2.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (np.array([1.0, np.nan]), [1.0, None]),
        (Scalar(), 1.0),
        (float("nan"), None),
        (float("inf"), None),
        (-float("inf"), None),
        (Path("/a/b"), "/a/b"),
        (b"\xff", "\ufffd"),
        (datetime(2026, 1, 2, 3, 4), "2026-01-02T03:04:00"),
        ({3, 1, 2}, [1, 2, 3]),
        (FinishReason.STOP, "stop"),
        (Message("user", "x"), {"role": "user", "content": "x", "extra": {}}),
        ({1: {"a": (1, None)}}, {"1": {"a": [1, None]}}),
        (object, "<class 'object'>"),
        (np.float32, "<class 'numpy.float32'>"),
    ],
)
def test_every_value_is_strict_json(value: object, expected: object) -> None:
    assert strict(dumps({"v": value})) == {"v": expected}


@pytest.mark.fault("OBS-07")
def test_a_torch_scalar_is_a_number() -> None:
    torch = pytest.importorskip("torch")
    assert plain(torch.tensor(1.0)) == 1.0
    assert plain(torch.tensor([1, 2], dtype=torch.bfloat16)) == [1.0, 2.0]


@pytest.mark.fault("OBS-08")
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udcff", "\ufffd"),
        ("\x00", "\x00"),
        ("😀", "😀"),
        ("x" * 10_000_000, "x" * 10_000_000),
    ],
    ids=["lone", "escape", "nul", "emoji", "10MB"],
)
def test_odd_text_is_written_and_read_again(tmp_path: Path, text: str, read: str) -> None:
    with JsonlWriter(tmp_path / "f.jsonl") as writer:
        writer.write({"t": text, text[:5]: 1})
    assert list(read_jsonl(tmp_path / "f.jsonl")) == [{"t": read, read[:5]: 1}]


@pytest.mark.fault("CKP-08")
def test_line_separators_inside_text_do_not_split_a_record(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    text = "a\u2028b\u0085c\u2029d\x0be\r"
    path.write_bytes(json.dumps({"t": text}, ensure_ascii=False).encode() + b"\r\n")  # as another program wrote it
    with JsonlWriter(path) as writer:
        writer.write({"t": text})
    assert list(read_jsonl(path)) == [{"t": text}, {"t": text}]


@pytest.mark.fault("CKP-08")
@pytest.mark.parametrize(
    ("tail", "kept"),
    [('{"n": 2', []), ('{"n": 2}', [{"n": 2}]), ("{", []), ('{"t": "' + "é" * 200_000, [])],
    ids=["cut", "no newline", "one byte", "long"],
)
def test_a_cut_last_line_is_dropped_and_appending_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tail: str, kept: list[dict[str, int]]
) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(('{"n": 1}\n' + tail).encode())
    assert list(read_jsonl(path)) == [{"n": 1}, *kept]
    caplog.clear()
    with JsonlWriter(path) as writer:
        writer.write({"n": 3})
    assert bool(caplog.records) is not bool(kept)
    caplog.clear()
    assert list(read_jsonl(path)) == [{"n": 1}, *kept, {"n": 3}]
    assert not caplog.records


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"n": 1}\n[1]\n\n{"n": 2}\n')
    assert [r["n"] for r in read_jsonl(path)] == [1, 2]
    assert "line 2" in caplog.text
    assert list(read_jsonl(tmp_path / "missing.jsonl")) == []


def test_flushed_records_are_there_before_the_writer_closes(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "deep" / "f.jsonl")
    writer.write({"n": 1})
    writer.write({"n": 2}, flush=True)
    assert [r["n"] for r in read_jsonl(writer.path)] == [1, 2]
    writer.close()
    writer.close()


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "f.jsonl") as writer:
        threads = [
            threading.Thread(target=lambda k=k: [writer.write({"k": k, "i": i, "x": "y" * 500}) for i in range(50)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_jsonl(tmp_path / "f.jsonl"))) == 200
