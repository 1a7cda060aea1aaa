"""Every flag and field that a dry run shows exists in the packages that get it: a rename fails here, not on 64 GPUs.

The packages are read as source from their wheels and never imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any
from zipfile import ZipFile

import pytest
from glm52_plugin.model import shapes_of


def source(wheel: ZipFile, name: str) -> ast.Module:
    return ast.parse(wheel.read(name).decode())


# --- Megatron-Core


@pytest.fixture(scope="session")
def dataclasses_of_megatron(megatron_wheel: ZipFile) -> dict[str, dict[str, ast.expr]]:
    """Fields, inherited ones included, with their annotations, by dataclass."""
    own: dict[str, tuple[list[str], dict[str, ast.expr]]] = {}
    for name in megatron_wheel.namelist():
        if not re.fullmatch(r"megatron/core/(\w+/)*\w+_config\.py", name):
            continue
        for node in source(megatron_wheel, name).body:
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                found = {
                    item.target.id: item.annotation
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
                if found:
                    own.setdefault(node.name, (bases, found))

    def fields(name: str) -> dict[str, ast.expr]:
        bases, found = own[name]
        return {key: value for base in bases if base in own for key, value in fields(base).items()} | found

    return {name: fields(name) for name in own}


@pytest.fixture(params=["78", "20", "6", "5"])
def settings(request: pytest.FixtureRequest, resolved: Any) -> dict[str, dict[str, Any]]:
    made = resolved(f"recipe.layers={request.param}")
    return dict(made.recipe.cluster(made.config).settings)


def test_every_megatron_field_exists(
    settings: dict[str, dict[str, Any]], dataclasses_of_megatron: dict[str, dict[str, ast.expr]]
) -> None:
    assert len(settings) == 3
    for component, values in settings.items():
        known = dataclasses_of_megatron[component.removeprefix("megatron ")]
        assert not values.keys() - known.keys()


def test_every_value_of_a_megatron_literal_is_one_of_its_choices(
    settings: dict[str, dict[str, Any]], dataclasses_of_megatron: dict[str, dict[str, ast.expr]]
) -> None:
    checked = 0
    for component, values in settings.items():
        known = dataclasses_of_megatron[component.removeprefix("megatron ")]
        for name, value in values.items():
            choices = [
                element.value
                for node in ast.walk(known[name])
                if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"
                for element in ast.walk(node.slice)
                if isinstance(element, ast.Constant)
            ]
            if choices and value is not None:
                assert value in choices, name
                checked += 1
    assert checked >= 5


def test_the_field_check_would_see_a_rename(dataclasses_of_megatron: dict[str, dict[str, ast.expr]]) -> None:
    assert "tensor_model_parallel_size" in dataclasses_of_megatron["MLATransformerConfig"]
    assert "tensor_parallel_size" not in dataclasses_of_megatron["MLATransformerConfig"]


@pytest.mark.parametrize("layers", [78, 20])
def test_the_pipeline_layout_is_read_by_megatron_as_the_split_that_is_meant(
    megatron_wheel: ZipFile, resolved: Any, layers: int
) -> None:
    """Megatron's own parser, taken out of its source."""
    made = resolved(f"recipe.layers={layers}")
    cluster = made.recipe.cluster(made.config)
    text = cluster.settings["megatron MLATransformerConfig"]["pipeline_model_parallel_layout"]
    (name,) = (n for n in megatron_wheel.namelist() if n.endswith("pipeline_parallel_layer_layout.py"))
    (parser,) = (
        node
        for node in ast.walk(source(megatron_wheel, name))
        if isinstance(node, ast.FunctionDef) and node.name == "parse_str_to_list"
    )
    parser.decorator_list = []
    scope: dict[str, Any] = {
        "re": re,
        "LayerType": type("L", (), {k: k for k in ("embedding", "loss", "decoder", "mtp")}),
    }
    exec(compile(ast.Module([parser], []), name, "exec"), scope)
    stages = scope["parse_str_to_list"](text)
    assert tuple(stage.count("decoder") for stage in stages) == made.config.trainer.options.split
    assert stages[0][0] == "embedding"
    assert stages[-1][-1] == "loss"


def test_what_megatron_refuses_together_is_not_set_together(settings: dict[str, dict[str, Any]]) -> None:
    """From its __post_init__: MLA interleaves by itself; sparse attention has no fused rope and gathers over CP."""
    fields = settings["megatron MLATransformerConfig"]
    assert not fields.get("rotary_interleaved")
    assert fields["apply_rope_fusion"] is False
    assert fields["cp_comm_type"] == "allgather" or fields["context_parallel_size"] == 1
    assert fields["sequence_parallel"]
    assert len(fields["moe_layer_freq"]) == fields["num_layers"]


@pytest.mark.parametrize("layers", [78, 20, 6])
def test_megatron_shares_indexers_in_the_same_layers(
    megatron_wheel: ZipFile, settings: dict[str, dict[str, Any]], layers: int
) -> None:
    """Megatron's own rule, taken out of its source, on the fields that it gets."""
    name = "megatron/core/transformer/experimental_attention_variant/dsa.py"
    (rule,) = (
        node
        for node in source(megatron_wheel, name).body
        if isinstance(node, ast.FunctionDef) and node.name == "is_dsa_skip_topk_layer"
    )
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([rule], []), name, "exec"), scope)
    fields = settings["megatron MLATransformerConfig"]
    offset, every = fields["dsa_indexer_skip_topk_offset"], fields["dsa_indexer_topk_freq"]
    own = [n for n in range(layers) if not scope["is_dsa_skip_topk_layer"](n + 1, offset, every)]
    assert tuple(own) == shapes_of(layers).indexers


# --- SGLang


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == name:
            yield node


@pytest.fixture(scope="session")
def sglang_flags(sglang_wheel: ZipFile) -> dict[str, list[Any]]:
    """Flags with their choices (empty: any): annotated fields of the server arguments, and ``add_argument`` calls."""
    flags: dict[str, list[Any]] = {}
    names = [n for n in sglang_wheel.namelist() if re.fullmatch(r"sglang/srt/arg_groups/fields/\w+\.py", n)]
    for name in names:
        for field in ast.walk(source(sglang_wheel, name)):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            arguments = next(iter(_calls(field.annotation, "Arg")), None)
            given = {k.arg: k.value for k in arguments.keywords} if arguments else {}
            if "no_cli" in given:
                continue
            choices = [
                element.value
                for node in ast.walk(field.annotation)
                if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"
                for element in ast.walk(node.slice)
                if isinstance(element, ast.Constant)
            ]
            listed = given.get("choices")
            if isinstance(listed, ast.List):
                choices = [element.value for element in listed.elts if isinstance(element, ast.Constant)]
            own = given.get("cli_name")
            flag = own.value if isinstance(own, ast.Constant) else "--" + field.target.id.replace("_", "-")
            flags[str(flag)] = choices
    tree = source(sglang_wheel, "sglang/srt/server_args.py")
    for call in _calls(tree, "add_argument"):
        if call.args and isinstance(call.args[0], ast.Constant):
            action = next((k.value for k in call.keywords if k.arg == "action"), None)
            if not getattr(action, "id", "").startswith("Deprecated"):
                flags.setdefault(str(call.args[0].value), [])
    for flag, name in (
        ("--tool-call-parser", "sglang/srt/function_call/parser_names.py"),
        ("--reasoning-parser", "sglang/srt/parser/reasoning_parser_names.py"),
    ):
        flags[flag] = [node.value for node in ast.walk(source(sglang_wheel, name)) if isinstance(node, ast.Constant)]
    return flags


@pytest.mark.parametrize(("profile", "layers"), [("balanced", 78), ("low-latency", 78), ("balanced", 5)])
def test_every_sglang_flag_exists_is_not_deprecated_and_has_an_allowed_value(
    resolved: Any, sglang_flags: dict[str, list[Any]], profile: str, layers: int
) -> None:
    made = resolved(f"recipe.inference={profile}", f"recipe.layers={layers}")
    plans = made.recipe.cluster(made.config).plans
    lines = [command for plan in plans for command in plan.commands if "sglang.launch_server" in command]
    assert len(lines) == (1 if profile == "balanced" else 2)
    for line in lines:
        assert line[:3] == ("python3", "-m", "sglang.launch_server")
        assert ('{"num_hidden_layers": 5, "num_nextn_predict_layers": 0}' in line) == (layers == 5)
        for word, value in zip(line[3:], (*line[4:], ""), strict=True):
            if word.startswith("--"):
                assert word in sglang_flags, word
                if sglang_flags[word] and not value.startswith("--"):
                    assert value in map(str, sglang_flags[word]), f"{word} {value}"


def test_the_flag_check_would_see_a_rename(sglang_flags: dict[str, list[Any]]) -> None:
    assert len(sglang_flags) > 200
    assert "--attn-dp-size" in sglang_flags
    assert "--enable-dp-attention" not in sglang_flags, "deprecated"
    assert "--fp8-gemm-backend" in sglang_flags
    assert "--dp-attention" not in sglang_flags
    assert "glm47" in sglang_flags["--tool-call-parser"]
