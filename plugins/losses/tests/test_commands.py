"""``rlcore losses`` as it is typed, its page, and combinations that are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlcore.errors import ConfigError
from rlcore_losses.aggregations import TokenMean
from rlcore_losses.chain import Chain
from rlcore_losses.compatibility import check
from rlcore_losses.corrections import NoCorrection, TokenTIS
from rlcore_losses.decoupled import Decoupled
from rlcore_losses.document import own_entries, render
from rlcore_losses.losses import CrossEntropy, PPOClip
from rlcore_losses.probe import probe
from rlcore_losses.rejections import Veto


def rlcore(*arguments):
    command = [sys.executable, "-c", "from rlcore.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_list_has_everything_with_its_line():
    found = json.loads(rlcore("losses", "--json").stdout)
    names = {(entry["kind"], entry["name"]) for entry in found}
    assert {
        ("correction", "token_tis"),
        ("loss", "ppo_clip"),
        ("advantage", "grpo"),
        ("aggregation", "token_mean"),
    } <= names
    assert all(
        entry["summary"] and entry["formula"] and entry["source"]
        for entry in found
        if entry["distribution"] == "rlcore-losses" and entry["name"] != "none"
    )
    text = rlcore("losses", "list").stdout
    assert "token_tis" in text
    assert "Truncated importance sampling" in text


def test_show_prints_formula_options_and_a_plot():
    text = rlcore("losses", "show", "token_tis").stdout
    for part in ("w_t = clamp(exp(Δ_t), low, high)", "rollout log-probs", "floor of the weight", "log-ratio", "***"):
        assert part in text


def test_show_gives_numbers_and_a_picture(tmp_path):
    picture = tmp_path / "curve.png"
    result = rlcore("losses", "show", "token_tis", "--set", "high=3", "--plot", str(picture), "--json")
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    (curve,) = json.loads(result.stdout)[0]["curves"]
    assert max(curve["y"]) == 3.0
    assert curve["y"][0] == pytest.approx(2.718281828**-4, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokn_tis"], "did you mean 'token_tis'?"),
        (
            ["token_tis", "--set", "hihg=3"],
            "correction.hihg: unknown key; did you mean 'high'? (--set correction.hihg)",
        ),
        (
            ["token_tis", "--set", "high=x"],
            'correction.high: should be a valid number, not "x" (--set correction.high)',
        ),
        (["token_tis", "--set", "high"], "--set correction.high: write it as correction.KEY=VALUE"),
        (["chain", "--set", 'steps=["vetoo"]'], "did you mean 'veto'? (--set correction.steps)"),
        (["token_tis", "--set", "low=3"], "low=3 is above ceiling high=2"),
        (["rloo", "--plot", "x.png"], "no curve"),
        (["token_tis", "--plot", "/nowhere/x.png"], "/nowhere/x.png"),
        (["token_tis", "--plot", "x.nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    result = rlcore("losses", "show", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_help_and_the_plugin_import_nothing_heavy():
    code = (
        "import sys, rlcore_losses.plugin\n"
        "from rlcore.plugins import load_plugins\n"
        "plugins = load_plugins()\n"
        "for offer in plugins.offers():\n"
        "    if offer.distribution == 'rlcore-losses': plugins.load(offer.kind, 'rlcore-losses:' + offer.name).Config\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "losses.md"
    assert page.read_text(encoding="utf-8") == render(), "run: python -m rlcore_losses.document docs/losses.md"


def test_every_piece_says_what_it_computes_and_from_what():
    for entry in own_entries():
        assert entry.formula, entry.name
        assert entry.reads or entry.kind == "aggregation", entry.name
        assert entry.denominator or entry.kind != "aggregation", entry.name
        assert entry.source or entry.name == "none", entry.name
        assert all(option.description for option in entry.options), entry.name


# --- combinations -----------------------------------------------------------------------------------------------------


def run_config(correction, loss, max_age=0):
    def section(cls, options):
        return SimpleNamespace(name=cls.name, options=cls.Config(**options))

    return SimpleNamespace(
        correction=section(*correction), loss=section(*loss), rollout=SimpleNamespace(max_age=max_age)
    )


@pytest.mark.fault("LOSS-25")
def test_staleness_that_nothing_sees_is_refused():
    with pytest.raises(ConfigError, match=r"rollout.max_age = 2 .*nothing sees their age"):
        check(run_config((NoCorrection, {}), (PPOClip, {}), max_age=2))
    check(run_config((NoCorrection, {}), (PPOClip, {}), max_age=0))
    check(run_config((NoCorrection, {}), (PPOClip, {"ratio_to": "rollout"}), max_age=2))
    check(run_config((NoCorrection, {}), (CrossEntropy, {}), max_age=2))
    check(run_config((TokenTIS, {}), (PPOClip, {}), max_age=2))


def test_a_gap_that_is_corrected_twice_is_refused():
    for loss in ((PPOClip, {"ratio_to": "rollout"}), (Decoupled, {})):
        for correction in ((TokenTIS, {}), (Chain, {"steps": ["veto", "icepop"]})):
            with pytest.raises(ConfigError, match="both correct the gap to the engine"):
                check(run_config(correction, loss))
        check(run_config((Veto, {}), loss))
        check(run_config((NoCorrection, {}), loss, max_age=3))


# --- foreign pieces ---------------------------------------------------------------------------------------------------


class LongWeights(NoCorrection):
    def __call__(self, trainer_logprobs, batch):
        corrected = super().__call__(trainer_logprobs, batch)
        return corrected._replace(weights=corrected.weights.new_ones(batch.mask.numel() + 1))


class TermsAreNotSummed(PPOClip):
    def __call__(self, logprobs, batch, corrected, token_weights):
        output = super().__call__(logprobs, batch, corrected, token_weights)
        return output._replace(loss=logprobs * 1)


class ReadsMasked(PPOClip):
    def __call__(self, logprobs, batch, corrected, token_weights):
        output = super().__call__(logprobs, batch, corrected, token_weights)
        return output._replace(loss=(logprobs - batch.rollout_logprobs).sum())


class Raises(PPOClip):
    def __call__(self, logprobs, batch, corrected, token_weights):
        raise IndexError("position 7 of 5")


@pytest.mark.parametrize(
    ("correction", "loss", "kind", "message"),
    [
        (NoCorrection, PPOClip, None, None),
        (LongWeights, PPOClip, "correction", r"weights is \[6\] torch.float32, not \[5\]"),
        (NoCorrection, TermsAreNotSummed, "loss", r"the loss is \[5\], not one number"),
        (NoCorrection, ReadsMasked, "loss", "not finite"),
        (NoCorrection, Raises, "loss", "IndexError: position 7 of 5"),
    ],
)
def test_a_foreign_piece_that_does_not_fit_is_found_before_the_run(correction, loss, kind, message):
    found = list(probe(correction(correction.Config()), loss(loss.Config()), TokenMean(TokenMean.Config())))
    assert [k for k, _ in found] == ([kind] if kind else [])
    assert all(re.search(message, text) for _, text in found)


def test_own_pieces_are_not_probed_and_import_no_torch():
    code = (
        "import sys\nfrom types import SimpleNamespace as N\nfrom rlcore_losses.plugin import rlcore_preflight\n"
        "config = N(correction=N(name='token_tis'), loss=N(name='ppo_clip'), aggregation=N(name='token_mean'))\n"
        "print(rlcore_preflight(config), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == ["[]", "False"]
