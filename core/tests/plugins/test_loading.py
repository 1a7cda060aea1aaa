"""Discovery: what is found, what is broken, what was asked for, and who offers it."""

import subprocess
from collections.abc import Callable

import pytest
from rlcore.errors import ConfigError, PluginError
from rlcore.plugins import Offer, Plugins, load_plugins

Install = Callable[..., None]
Command = Callable[..., subprocess.CompletedProcess[str]]

SANDBOX = """
    from rlcore import hookimpl

    @hookimpl
    def rlcore_register_sandboxes(register):
        register("cloud", "cloud_impl:Cloud")
"""

BROKEN = {
    "raises ImportError": ("import not_there_at_all", "No module named 'not_there_at_all'"),
    "raises SyntaxError": ("def broken(:", "SyntaxError"),
    "exits": ("raise SystemExit(1)", "SystemExit: 1"),
    "was removed": (None, "No module named 'bad_plugin'"),
    "raises with a long text": ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
    "offers nonsense": (
        "from rlcore import hookimpl\n@hookimpl\ndef rlcore_register_losses(register): register('x', 'no target')",
        "the target of loss 'x' is 'no target'",
    ),
    "fails while offering": (
        "from rlcore import hookimpl\n@hookimpl\ndef rlcore_register_losses(register): register('x', 'a:B'); 1 / 0",
        "ZeroDivisionError",
    ),
    "offers a name twice": (
        "from rlcore import hookimpl as h\n@h\n"  # noqa: ISC004
        "def rlcore_register_losses(register): register('my_x', 'a:B'); register('My-X', 'a:C')",
        "it offers loss 'My-X' twice",
    ),
    "misspells a hook": (
        "from rlcore import hookimpl\n@hookimpl\ndef rlcore_register_losess(register): pass",
        "unknown hook 'rlcore_register_losess'; did you mean 'rlcore_register_losses'?",
    ),
    "takes an unknown argument": (
        "from rlcore import hookimpl\n@hookimpl\ndef rlcore_register_losses(registry): pass",
        "registry",
    ),
    "gives an argument a default": (
        "from rlcore import hookimpl\n@hookimpl\ndef rlcore_step_finished(step, metrics=None): pass",
        "rlcore_step_finished gives a default to metrics",
    ),
    "wraps a hook": (
        "from rlcore import hookimpl\n@hookimpl(wrapper=True)\ndef rlcore_register_losses(register): yield",
        "rlcore_register_losses is a hook wrapper",
    ),
    "is for a later hook API": (
        "RLCORE_HOOK_API = 99",
        "it is written for hook API 99, this rlcore has 1: install a newer version of rlcore",
    ),
    "is for an earlier hook API": ("RLCORE_HOOK_API = 0", "install a newer version of the plugin"),
}


def named(plugins: Plugins, name: str) -> tuple[str, str]:
    found = plugins.find(name)
    return found.status, found.reason


@pytest.mark.fault("PLG-01")
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_plugin_takes_nothing_down(install: Install, what: str) -> None:
    source, reason = BROKEN[what]
    install("bad-dist", {"bad": "bad_plugin"}, {} if source is None else {"bad_plugin": source}, version="3.1")
    install("cloud-dist", {"cloud": "cloud_plugin"}, {"cloud_plugin": SANDBOX})
    warnings: list[str] = []
    plugins = load_plugins(warn=warnings.append)
    assert [(p.name, p.status) for p in plugins.broken] == [("bad", "broken")]
    assert reason in plugins.find("bad").reason
    assert "\n" not in plugins.find("bad").reason
    assert plugins.offer("sandbox", "cloud").distribution == "cloud-dist"
    assert not [offer for offer in plugins.offers() if offer.plugin == "bad"]
    assert len(warnings) == 1
    assert "bad (bad-dist 3.1)" in warnings[0]
    assert reason in warnings[0]


@pytest.mark.fault("PLG-01")
@pytest.mark.parametrize("what", ["raises ImportError", "raises SyntaxError", "exits", "was removed"])
def test_the_command_line_works_beside_a_broken_plugin(install: Install, rlcore: Command, what: str) -> None:
    source, reason = BROKEN[what]
    install("bad-dist", {"bad": "bad_plugin"}, {} if source is None else {"bad_plugin": source})
    listed = rlcore("plugins")
    assert listed.returncode == 0
    assert reason in listed.stdout
    done = rlcore("--help")
    assert done.returncode == 0, done.stderr
    assert "plugins" in done.stdout
    for stderr in (listed.stderr, done.stderr):
        assert len(stderr.splitlines()) == 1
        assert "bad (bad-dist 1.0)" in stderr


@pytest.mark.parametrize("what", ["raises ImportError", "exits", "is for a later hook API"])
def test_a_broken_plugin_that_was_asked_for_stops_the_command(install: Install, rlcore: Command, what: str) -> None:
    source, reason = BROKEN[what]
    install("bad-dist", {"bad": "bad_plugin"}, {"bad_plugin": source or ""})
    for arguments, environment in ((["--plugin", "bad"], {}), ([], {"RLCORE_PLUGINS": "bad"})):
        done = rlcore(*arguments, "plugins", **environment)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "bad (bad-dist 1.0)" in done.stderr
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
    assert "Traceback" in rlcore("-p", "bad", "--traceback", "plugins").stderr


def test_a_name_that_only_a_broken_plugin_could_offer_says_so(install: Install) -> None:
    install("bad-dist", {"bad": "bad_plugin"}, {"bad_plugin": "import not_there"})
    plugins = load_plugins(warn=lambda line: None)
    with pytest.raises(PluginError, match=r"no sandbox named 'bad'(.|\n)*bad \(bad-dist 1.0\) is broken"):
        plugins.offer("sandbox", "bad")


def test_a_blocked_plugin_is_not_imported(install: Install, rlcore: Command) -> None:
    install("loud-dist", {"loud": "loud_plugin"}, {"loud_plugin": "print('imported')"})
    assert "imported" in rlcore("plugins").stdout
    done = rlcore("--no-plugin", "loud", "plugins")
    assert "imported" not in done.stdout
    assert "off: --no-plugin" in done.stdout
    assert rlcore("--no-plugin", "lout", "plugins").returncode == 2
    with pytest.raises(ConfigError, match="both asked for and blocked"):
        load_plugins(["loud"], blocked=["loud"])


@pytest.mark.parametrize(
    ("selection", "loaded"),
    [
        (None, {"builtin", "one", "two", "three"}),
        ("", {"builtin"}),
        ("one", {"builtin", "one"}),
        (" one , two ,", {"builtin", "one", "two"}),
    ],
)
def test_selection_by_environment(install: Install, selection: str | None, loaded: set[str]) -> None:
    for name in ("one", "two", "three"):
        install(f"{name}-dist", {name: f"{name}_plugin"}, {f"{name}_plugin": ""})
    environ = {} if selection is None else {"RLCORE_PLUGINS": selection}
    plugins = load_plugins(environ=environ)
    active = {plugin.name for plugin in plugins.all if plugin.status == "ok"}
    assert active & {"builtin", "one", "two", "three"} == loaded
    assert selection is None or active == loaded
    assert {p.name for p in load_plugins(["three"], environ=environ).all if p.status == "ok"} == active | {"three"}


def test_unknown_plugins_are_errors_with_the_nearest_name(install: Install) -> None:
    install("sky-dist", {"skylark": "x_plugin"}, {"x_plugin": ""})
    with pytest.raises(PluginError, match="no plugin named 'sklyark'; did you mean 'skylark'"):
        load_plugins(["sklyark"])
    with pytest.raises(PluginError, match="no plugin named 'nowhere'"):
        load_plugins(environ={"RLCORE_PLUGINS": "nowhere"})


@pytest.mark.fault("PLG-03")
@pytest.mark.parametrize(
    "name", ["own/My-Env@0.1.5", "my-env", "my_env", "My.Env", "my_env_pkg.mod:factory", "x/y/my-env"]
)
def test_every_spelling_finds_the_same_plugin_and_offer(install: Install, name: str) -> None:
    source = """
        class factory:
            from rlcore import hookimpl

            @staticmethod
            @hookimpl
            def rlcore_register_agent_loops(register):
                register("my_env", Env)

        class Env:
            pass
    """
    install("my-env-dist", {"My-Env": "my_env_pkg.mod:factory"}, {"my_env_pkg.mod": source}, version="0.1.5")
    plugins = load_plugins([name])
    assert [p.name for p in plugins.all if p.distribution == "my-env-dist"] == ["My-Env"]
    assert plugins.find("my-env").status == "ok"
    spelling = "my_env_pkg.mod:Env" if ":" in name else name
    import my_env_pkg.mod  # type: ignore[import-not-found]

    assert plugins.load("agent", spelling) is my_env_pkg.mod.Env


@pytest.mark.fault("PLG-03")
@pytest.mark.parametrize("name", ["../x", "a;b", "", "a b", "/etc/passwd", "a/../b", "-x", "x@", "a:b;c", "é"])
def test_what_is_no_name_is_refused(install: Install, name: str) -> None:
    with pytest.raises(PluginError):
        load_plugins([name or " ; "])
    plugins = load_plugins()
    with pytest.raises(PluginError):
        plugins.offer("agent", name)


def test_a_version_that_is_not_installed_is_refused(install: Install) -> None:
    install("cloud-dist", {"cloud": "cloud_plugin"}, {"cloud_plugin": SANDBOX})
    with pytest.raises(PluginError, match=r"asks for version 2\.0, but installed is cloud"):
        load_plugins(["cloud@2.0"])
    plugins = load_plugins(["cloud@1.0"])
    with pytest.raises(PluginError, match=r"asks for version 2\.0"):
        plugins.offer("sandbox", "cloud@2.0")


def test_a_module_in_development_is_a_plugin(install: Install, rlcore: Command, tmp_path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "dev.py").write_text(
        "from rlcore import hookimpl\n@hookimpl\ndef rlcore_register_losses(register): register('dev_loss', 'dev:L')\n"
    )
    done = rlcore("-p", "dev", "plugins", cwd=tmp_path / "project")
    assert done.returncode == 0, done.stderr
    assert "dev_loss" in done.stdout
    missing = rlcore("-p", "dev.nothing", "plugins", cwd=tmp_path / "project")
    assert missing.returncode == 2
    assert "dev.nothing is broken" in missing.stderr
    no_hooks = rlcore("-p", "json", "plugins")
    assert no_hooks.returncode == 2
    assert "it implements no hook" in no_hooks.stderr


def test_one_name_of_two_distributions_is_an_error_at_use(install: Install, rlcore: Command) -> None:
    other = SANDBOX.replace("cloud_impl:Cloud", "other_impl:Cloud").replace('"cloud"', '"Cloud"')
    install("cloud-dist", {"cloud": "cloud_plugin"}, {"cloud_plugin": SANDBOX, "cloud_impl": "class Cloud: pass"})
    install("other-dist", {"other": "other_plugin"}, {"other_plugin": other, "other_impl": "class Cloud: pass"})
    plugins = load_plugins()
    with pytest.raises(PluginError, match=r"offered by cloud-dist 1.0 and other-dist 1.0") as error:
        plugins.offer("sandbox", "cloud")
    assert "'cloud-dist:cloud'" in str(error.value)
    assert plugins.offer("sandbox", "other_dist:cloud").target == "other_impl:Cloud"
    assert plugins.offer("sandbox", "cloud-dist:cloud").target == "cloud_impl:Cloud"
    assert plugins.offer("sandbox", "cloud:cloud").target == "cloud_impl:Cloud"
    with pytest.raises(PluginError, match="no sandbox named 'cloud:clowd'; did you mean 'cloud'"):
        plugins.offer("sandbox", "cloud:clowd")
    listed = rlcore("plugins", "list")
    assert "claimed by other-dist too" in listed.stdout
    assert listed.returncode == 0


def test_one_plugin_name_in_two_distributions(install: Install) -> None:
    install("a-dist", {"same": "a_plugin"}, {"a_plugin": SANDBOX})
    install("b-dist", {"same": "b_plugin"}, {"b_plugin": SANDBOX.replace('"cloud"', '"sky"')})
    assert {"cloud", "sky"} <= set(load_plugins().names("sandbox"))
    with pytest.raises(PluginError, match=r"a-dist 1\.0 and b-dist 1\.0"):
        load_plugins(["same"])
    plugins = load_plugins(blocked=["b-dist:same"])
    assert "sky" not in plugins.names("sandbox")


@pytest.mark.parametrize(
    ("target", "source", "reason"),
    [
        ("t_impl:Cloud", "import not_there", "No module named 'not_there'"),
        ("t_impl:Cloud", "raise SystemExit(3)", "SystemExit: 3"),
        ("t_impl:Clod", "class Cloud: pass", "has no attribute 'Clod'"),
        ("t_impl:Cloud", "Cloud = 3", "is a int, not a class"),
        ("t_gone:Cloud", "", "No module named 't_gone'"),
    ],
)
def test_a_lazy_target_that_fails_names_everything(install: Install, target: str, source: str, reason: str) -> None:
    install("t-dist", {"t": "t_plugin"}, {"t_plugin": SANDBOX.replace("cloud_impl:Cloud", target), "t_impl": source})
    plugins = load_plugins()
    with pytest.raises(PluginError) as error:
        plugins.load("sandbox", "cloud")
    for part in ("sandbox 'cloud'", "t (t-dist 1.0)", target, reason):
        assert part in str(error.value)


@pytest.mark.fault("PLG-05")
def test_names_that_are_registered_in_a_loop_stay_apart(install: Install) -> None:
    source = """
        from rlcore import hookimpl

        def environment(label):
            class Environment:
                name = label
            return Environment

        @hookimpl
        def rlcore_register_agent_loops(register):
            for name in "abc":
                register(name, environment(name))

        @hookimpl
        def rlcore_register_graders(register):
            for name in "abc":
                register(name, f"loop_impl:{name.upper()}")
    """
    classes = "\n".join(f"class {name}: name = {name!r}" for name in "ABC")
    install("loop-dist", {"loop": "loop_plugin"}, {"loop_plugin": source, "loop_impl": classes})
    plugins = load_plugins()
    assert [plugins.load("agent", name).name for name in "abc"] == ["a", "b", "c"]
    assert [plugins.load("grader", name).name for name in "abc"] == ["A", "B", "C"]
    assert {offer.plugin for offer in plugins.offers("agent") if offer.name in "abc"} == {"loop"}


def test_the_hash_is_that_of_names_versions_and_offers(install: Install, site) -> None:
    first = load_plugins(["builtin"])
    assert first.hash == load_plugins().hash
    assert len(first.hash) == 64
    install("cloud-dist", {"cloud": "cloud_plugin"}, {"cloud_plugin": SANDBOX})
    with_cloud = load_plugins()
    assert with_cloud.hash != first.hash
    assert load_plugins(blocked=["cloud"]).hash == first.hash
    entry = next(p for p in with_cloud.provenance()["plugins"] if p["name"] == "cloud")
    assert entry == {
        "name": "cloud",
        "distribution": "cloud-dist",
        "version": "1.0",
        "offers": ["sandbox:cloud=cloud_impl:Cloud"],
    }
    metadata = site / "cloud_dist-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert load_plugins().hash not in (first.hash, with_cloud.hash)


def test_default_recipe_of_a_plugin(install: Install) -> None:
    def recipes(*names: str) -> str:
        lines = "; ".join(f"register({name!r}, 'm:R')" for name in names) or "pass"
        return f"from rlcore import hookimpl\n@hookimpl\ndef rlcore_register_recipes(register): {lines}"

    install("one-dist", {"one": "one_plugin"}, {"one_plugin": recipes("only")})
    install("many-dist", {"many": "many_plugin"}, {"many_plugin": recipes("b", "a")})
    install("named-dist", {"glm-5": "named_plugin"}, {"named_plugin": recipes("glm_5", "glm_5_small")})
    install("none-dist", {"none": "none_plugin"}, {"none_plugin": recipes()})
    plugins = load_plugins()
    assert plugins.default_recipe("one") == "only"
    assert plugins.default_recipe("glm-5") == "glm_5"
    with pytest.raises(PluginError, match="several recipes: name one of a, b"):
        plugins.default_recipe("many")
    with pytest.raises(PluginError, match="offers no recipe"):
        plugins.default_recipe("none")


def test_unknown_kinds_and_names_say_what_there_is(install: Install) -> None:
    install("cloud-dist", {"cloud": "cloud_plugin"}, {"cloud_plugin": SANDBOX})
    plugins = load_plugins()
    with pytest.raises(PluginError, match="did you mean 'cloud'"):
        plugins.offer("sandbox", "clowd")
    with pytest.raises(PluginError, match="did you mean 'sandbox'"):
        plugins.offer("sandboxes", "cloud")
    assert str(plugins.offer("sandbox", "cloud")) == "sandbox 'cloud' of cloud (cloud-dist 1.0)"
    assert plugins.offer("sandbox", "any.where:Class") == Offer("sandbox", "any.where:Class", "any.where:Class")
