"""What backends share: bounded output, copies that nothing escapes from, refusals told apart."""

import io
import os
import socket
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlcore.errors import SandboxLost
from rlcore.sandbox_tools import (
    BoundedBytes,
    checked_timeout,
    clipped_text,
    owner_is_gone,
    ownership,
    pack_folder,
    shares,
    speaks_of_quota,
    unpack_folder,
)
from rlcore.shell_sandbox import ShellSandbox, _parsed


@pytest.mark.fault("SBX-07")
@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(0, 400))
def test_bounded_bytes_keep_head_and_tail_of_any_stream(chunks, limit):
    kept = BoundedBytes(limit)
    for chunk in chunks:
        kept.feed(chunk)
    whole = b"".join(chunks)
    text, cut = kept.text()
    assert (kept.total, cut) == (len(whole), len(whole) > limit)
    if not cut:
        assert text == whole.decode("utf-8", "replace")
        assert kept.whole() == whole
    else:
        head, tail = shares(limit)
        assert text == clipped_text(whole[:head], whole[len(whole) - tail :] if tail else b"", len(whole))


@pytest.mark.fault("SBX-05")
@given(st.text(min_size=50), st.integers(1, 40), st.integers(1, 40))
def test_a_cut_breaks_no_character_and_counts_what_is_missing(text, head, tail):
    data = text.encode()
    if head + tail >= len(data):
        return
    shown = clipped_text(data[:head], data[-tail:], len(data))
    assert "\ufffd" not in shown or "\ufffd" in text
    front, rest = shown.split("\n[... ", 1)
    count, back = rest.split(" bytes left out ...]\n", 1)
    assert len(front.encode()) + int(count) + len(back.encode()) == len(data)


@pytest.mark.fault("SBX-22")
def test_a_timeout_is_a_finite_number_above_zero():
    assert (checked_timeout(10), checked_timeout(0.4)) == (10.0, 0.4)
    for wrong in (0, -1, float("inf"), float("nan"), "3", None, True):
        with pytest.raises(ValueError, match="timeout must be"):
            checked_timeout(wrong)


@pytest.mark.fault("SBX-19")
@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("Total CPU limit exceeded. Maximum allowed: 500.", True),
        ("Total disk limit exceeded", True),
        ("Total memory limit exceeded", True),
        ("Sandbox resource limit reached (16), please try again later.", True),
        ("ThrottlerException: Too Many Requests", True),
        ("You have reached your pull rate limit", True),
        ("quota exceeded for project", True),
        ("No available runners", True),
        ("cpu must be between 1 and 4", False),
        ("memory must be at least 128", False),
        ("disk must be less than 10 GiB per sandbox", False),
        ("image not found", False),
        ("Unauthorized", False),
    ],
)
def test_a_quota_is_told_from_a_wrong_configuration(text, quota):
    assert speaks_of_quota(text) is quota


def archive(*entries):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if kind == tarfile.REGTYPE:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.linkname = content
                tar.addfile(entry)
    out.seek(0)
    return out


@pytest.mark.parametrize("name", ["../out", "/abs", "a/../../out", "a/b/../../../out"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not below its folder"):
        unpack_folder(archive((name, tarfile.REGTYPE, b"x")), tmp_path / "in", max_bytes=10_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_links_of_every_kind_are_left_out_and_never_written_through(tmp_path):
    (tmp_path / "secret").write_text("untouched")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "planted").symlink_to(tmp_path)
    entries = [
        ("sym", tarfile.SYMTYPE, str(tmp_path)),
        ("sym/secret", tarfile.REGTYPE, b"overwritten"),
        ("hard", tarfile.LNKTYPE, "../secret"),
        ("pipe", tarfile.FIFOTYPE, ""),
        ("device", tarfile.CHRTYPE, ""),
        ("planted/secret", tarfile.REGTYPE, b"overwritten"),
        ("ok", tarfile.REGTYPE, b"fine"),
    ]
    unpack_folder(archive(*entries), tmp_path / "in", max_bytes=100_000)
    assert (tmp_path / "secret").read_text() == "untouched"
    assert (tmp_path / "in" / "ok").read_bytes() == b"fine"
    assert not any(path.is_symlink() for path in (tmp_path / "in").rglob("*"))


def test_a_folder_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(ValueError, match="larger than"):
        unpack_folder(archive(("big", tarfile.REGTYPE, bytes(5000))), tmp_path / "in", max_bytes=4000)


@pytest.mark.parametrize("link", ["/etc/passwd", "../outside", "sub/../../outside"])
def test_a_link_that_leaves_the_source_is_not_packed(tmp_path, link):
    (tmp_path / "source" / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "source" / "link").symlink_to(link)
    with pytest.raises(ValueError, match="outside"):
        pack_folder(tmp_path / "source", io.BytesIO())


def test_what_is_packed_comes_out_the_same(tmp_path):
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "-odd\nname").write_bytes(b"\0\xff")
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / os.fsdecode(b"\xff-bytes")).write_text("x")
    packed = io.BytesIO()
    pack_folder(source, packed)
    packed.seek(0)
    unpack_folder(packed, tmp_path / "copy", max_bytes=100_000)
    found = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")}
    assert found == {str(path.relative_to(source)) for path in source.rglob("*")}
    assert (tmp_path / "copy" / "run").stat().st_mode & 0o777 == 0o755
    os.mkfifo(source / "pipe")
    with pytest.raises(ValueError, match="neither"):
        pack_folder(source, io.BytesIO())


def test_owners_are_told_apart():
    labels = ownership("run-1")
    assert owner_is_gone(labels) is False
    assert owner_is_gone({"owner": f"{socket.gethostname()}:{os.getpid()}:1"}) is True, "the number is another's by now"
    assert owner_is_gone({"owner": f"{socket.gethostname()}:99999999:1"}) is True
    for elsewhere in ({"owner": "another:1:1"}, {}, {"owner": "x"}):
        assert owner_is_gone(elsewhere) is None


@pytest.mark.fault("SBX-15")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", None),
        ("running:\n", None),
        ("rc:\ndone:\n", None),
        ("rc:7\ndone:\n", None),
        ("rc:7 0\no:0\n", None),
        ("rc:7 0\no:0\ne:0\ndone:\n", "7 0"),
        ("noise\nrc: 7 0\ndone:\n", " 7 0"),
    ],
)
def test_an_end_that_is_half_written_is_none(text, code):
    parsed = _parsed(text)
    assert (parsed["rc"] if parsed else None) == code


class Deaf:
    """A carrier whose sandbox never says that a command has ended."""

    def __init__(self):
        self.scripts = []

    async def call(self, script, *, seconds):
        self.scripts.append(script)
        return "0\nroot\nhas:setsid\nhas:mkfifo\nhas:dd\nhas:base64\nhas:tail\nhas:tar\nhas:proc\n"

    async def alive(self):
        return False


@pytest.mark.fault("SBX-15")
@pytest.mark.anyio
async def test_an_end_that_is_never_written_is_a_timeout_that_kills():
    box = await ShellSandbox(Deaf(), sandbox_id="deaf").prepare()
    result = await box.exec("true", timeout=0.1)
    assert (result.timed_out, result.exit_code) == (True, -1)
    assert any("kill -KILL" in script for script in box._carrier.scripts[2:])


@pytest.mark.fault("SBX-21")
@pytest.mark.anyio
async def test_a_carrier_that_fails_for_good_is_a_lost_sandbox():
    from rlcore.errors import InfraError

    class Failing(Deaf):
        async def call(self, script, *, seconds):
            raise InfraError("no route")

    with pytest.raises(SandboxLost, match="no route"):
        await ShellSandbox(Failing(), sandbox_id="x").prepare()
