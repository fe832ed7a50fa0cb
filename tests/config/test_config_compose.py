"""Precedence, choice of files, values and their errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as settings_of_search
from hypothesis import strategies as st

from kvpop_lightning.config.compose import FREE_TEXT, compose, to_yaml
from kvpop_lightning.config.describe import settings
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder with its own `configs`, as working folder."""
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(project: Path, name: str, body: dict) -> None:
    path = project / "configs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(body))


def problems(*words: str, **kwargs: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(list(words), **kwargs)  # type: ignore[arg-type]
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def test_nothing_given_is_the_schema_with_resolved_defaults(project: Path) -> None:
    config = compose([])
    target = replace(Config().distill.target, source="teacher")
    assert config == replace(Config(), distill=replace(Config().distill, target=target))


def test_precedence_of_every_layer(project: Path) -> None:
    """Each layer sets one key more than the next stronger one: every pair of neighbours is decided
    somewhere."""
    keys = ["max_steps", "accumulate", "rows_per_step", "checkpoint_every", "log_every"]
    write(project, "trainer/file.yaml", dict.fromkeys(keys, 11))
    write(
        project,
        "experiment/e.yaml",
        {"defaults": {"trainer": "file"}, "trainer": dict.fromkeys(keys[1:], 12)},
    )
    write(project, "local.yaml", {"trainer": dict.fromkeys(keys[2:], 13)})
    point = {f"trainer.{key}": 14 for key in keys[3:]}
    words = ["experiment=e", f"trainer.{keys[4]}=15"]
    for order in (words, words[::-1]):
        trainer = compose(order, sweep_point=point).trainer
        assert [getattr(trainer, key) for key in keys] == [11, 12, 13, 14, 15]
        assert trainer.warmup_steps == Config().trainer.warmup_steps  # the schema, below all


def test_command_line_choice_replaces_the_experiments_choice(project: Path) -> None:
    write(project, "policy/a.yaml", {"decay": 0.5, "decay_step": 7})
    write(project, "policy/b.yaml", {"decay": 0.25})
    write(project, "experiment/e.yaml", {"defaults": {"policy": "a"}, "policy": {"budget": {"topk": 99}}})
    assert compose(["experiment=e"]).policy.decay_step == 7
    policy = compose(["experiment=e", "policy=b"]).policy
    assert (policy.decay, policy.decay_step, policy.budget.topk) == (0.25, Config().policy.decay_step, 99)
    write(project, "local.yaml", {"defaults": {"policy": "b"}})
    assert compose(["experiment=e"]).policy.decay == 0.25
    assert compose(["experiment=e", "policy=a"]).policy.decay == 0.5
    assert compose(["experiment=e"], sweep_point={"policy": "a"}).policy.decay == 0.5


def test_value_beats_a_later_choice_of_file(project: Path) -> None:
    write(project, "policy/a.yaml", {"decay": 0.5})
    assert compose(["policy.decay=0.75", "policy=a"]).policy.decay == 0.75


def test_lists_are_replaced_and_last_word_wins(project: Path) -> None:
    assert compose(["eval.budgets=[99]", "eval.budgets=70,80"]).eval.budgets == [70, 80]


def test_one_policy_on_the_command_line_is_the_only_one_trained(project: Path) -> None:
    assert compose(["experiment=demo"]).train_policies == ["kvpop_mlp", "kvpop_mlstm"]
    assert compose(["experiment=demo", "policy=kvpop_mlstm"]).train_policies == []
    words = ["experiment=demo", "policy=kvpop_mlstm", "train_policies=kvpop_mlp"]
    assert compose(words).train_policies == ["kvpop_mlp"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_shipped_experiments_compose(name: str, project: Path) -> None:
    config = compose([f"experiment={name}"])  # found beside the package: the project has none of its own
    assert config.experiment == name
    assert config.run_dir == f"runs/{name}"


def test_demo_sizes() -> None:
    """The sizes that fit two cores and ten minutes, and the compression ratios the table states."""
    config = compose(["experiment=demo"])
    assert config.eval.reference_length == config.data.row_length == 1024
    assert config.eval.budgets == [256, 128, 64]
    budget = config.policy.budget
    assert (budget.sink, budget.window, budget.sink + budget.window + budget.topk) == (4, 32, 128)
    assert config.data.eval_rows >= config.eval.rows >= 4


def test_paper_settings() -> None:
    for name in ("qwen3_4b", "qwen3_8b"):
        config = compose([f"experiment={name}"])
        budget = config.policy.budget
        assert (budget.sink, budget.window, budget.sink + budget.window + budget.topk) == (4, 256, 4096)
        assert (config.data.row_length, config.trainer.max_steps, config.distill.kl_topk) == (
            16384,
            2000,
            256,
        )
        assert config.distill.target.source == "student"
        assert config.eval.budgets == [4096, 2048]


@pytest.mark.parametrize("group", ["model", "policy", "distill", "trainer", "eval", "tracking", "data"])
def test_every_shipped_file_composes(group: str) -> None:
    for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
        words = [f"{group}={path.stem}"]
        if group == "distill" and path.stem == "paper":
            words.append("trainer.base=full")
        if group == "data" and path.stem in ("jsonl", "parquet", "teacher_traces"):
            words.append("data.path=some.file")
        config = compose(words)
        if group == "policy":
            assert config.policy.name == path.stem


@pytest.mark.parametrize(
    "words", [[], ["experiment=demo", "seed=7"], ["experiment=qwen3_4b", "tracking.tags.a=b"]]
)
def test_printed_configuration_composes_to_the_same(words: list[str], tmp_path: Path) -> None:
    config = compose(words)
    file = tmp_path / "printed.yaml"
    file.write_text(to_yaml(config))
    assert compose([f"experiment={file}"]) == config


@settings_of_search(max_examples=30, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_prompt_survives(text: str) -> None:
    config = compose([f"prompt={text}"], command="generate")
    assert config.generate.prompt == text


@pytest.mark.parametrize(
    "prompt", ["${data.row_length}", "cost: \\${5} [a, b]", "a=b=c", "null and {void}", "1e5"]
)
def test_prompt_is_text_also_when_printed(prompt: str, tmp_path: Path) -> None:
    config = compose([f"generate.prompt={prompt}"])
    assert config.generate.prompt == prompt
    file = tmp_path / "printed.yaml"
    file.write_text(to_yaml(config))
    assert compose([f"experiment={file}"]) == config


def test_references_between_keys_are_resolved(project: Path) -> None:
    write(project, "experiment/e.yaml", {"data": {"row_length": "${eval.reference_length}"}})
    assert compose(["experiment=e", "eval.reference_length=2048"]).data.row_length == 2048
    write(project, "experiment/e.yaml", {"data": {"row_length": "${eval.nothing}"}})
    [problem] = problems("experiment=e")
    assert "data.row_length" in problem
    assert "eval.nothing" in problem


def test_target_source_follows_the_base() -> None:
    assert compose(["trainer.base=frozen"]).distill.target.source == "teacher"
    assert compose(["trainer.base=full"]).distill.target.source == "student"
    assert compose(["trainer.base=full", "distill.target.source=teacher"]).distill.target.source == "teacher"


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("policy.budget.topkk=3", ["policy.budget.topkk", "policy.budget.topk?"]),
        ("plicy.decay=0.5", ["plicy.decay", "policy.decay"]),
        ("topk=3", ["'topk'", "policy.budget.topk"]),
        ("model.name.x=3", ["model.name.x"]),
        ("zzzz=1", ["unknown key 'zzzz'"]),
        ("=1", ["unknown key ''"]),
        ("policy.budget=3", ["policy.budget is a group", "policy.budget.sink", "policy.budget.topk"]),
        ("policy.budget.topk", ["not key=value", "policy.budget.topk"]),
        ("--seed=1", ["write seed=1"]),
        ("policy=kvpop_mlstmm", ["policy=kvpop_mlstmm", "did you mean kvpop_mlstm"]),
        ("experiment=dem", ["experiment=dem", "demo"]),
        ("experiment=../policy/full", ["experiment=../policy/full"]),
        ("experiment=nothing.yaml", ["nothing.yaml"]),
        ("policy.budget.topk=many", ["policy.budget.topk=many", "expected int", "'many' (str)"]),
        ("policy.budget.topk=2.5", ["expected int"]),
        ("policy.budget.topk=true", ["expected int"]),
        ("policy.budget.topk=", ["policy.budget.topk", "expected int", "nothing"]),
        ("policy.decay=[1]", ["policy.decay", "expected float"]),
        ("policy.equal_bytes=perhaps", ["policy.equal_bytes", "expected bool"]),
        ("eval.budgets=64,x", ["eval.budgets", "expected list of int"]),
        ("eval.budgets={", ["eval.budgets", "expected list of int"]),
        ("policy.decay={", ["policy.decay", "expected float"]),
        ("policy.scorer.delay=soon", ["expected int or null"]),
        ("tracking.tags=5", ["tracking.tags", "expected mapping of str to str"]),
    ],
)
def test_bad_word_is_one_line(word: str, parts: list[str], project: Path) -> None:
    [problem] = problems(word)
    for part in parts:
        assert part in problem


def test_all_bad_words_are_reported_together() -> None:
    found = problems("policy.budget.topkk=3", "foo", "policy.decay=x", "policy=nope", "seed=1")
    assert len(found) == 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trainer:\n  max_stepps: 3\n", ["e.yaml", "trainer.max_stepps", "trainer.max_steps"]),
        ("trainer:\n  max_steps: lots\n", ["e.yaml", "trainer.max_steps=lots", "expected int"]),
        ("trainer:\n  max_steps:\n", ["e.yaml", "trainer.max_steps", "nothing"]),
        ("trainer: [1\n", ["e.yaml:2:1", "not valid YAML"]),
        ("- a\n- b\n", ["e.yaml", "expected keys and values", "list"]),
        ("policy: kvpop_mlp\n", ["e.yaml", "policy", "under `defaults:`"]),
        ("defaults: [a]\n", ["e.yaml", "defaults must map"]),
        ("defaults: {polcy: full}\n", ["e.yaml", "unknown group 'polcy'", "policy"]),
        ("defaults: {policy: fulll}\n", ["e.yaml", "policy=fulll", "full"]),
    ],
)
def test_bad_file_is_one_line_that_names_it(text: str, parts: list[str], project: Path) -> None:
    (project / "configs" / "experiment").mkdir()
    (project / "configs" / "experiment" / "e.yaml").write_text(text)
    [problem] = problems("experiment=e")
    for part in parts:
        assert part in problem


def test_empty_sections_and_files_say_nothing(project: Path) -> None:
    (project / "configs" / "local.yaml").write_text("")
    write(project, "experiment/e.yaml", {"policy": None, "defaults": None})
    assert compose(["experiment=e"]) == replace(compose([]), experiment="e")


def test_own_configs_come_before_the_packages(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, "policy/kvpop_mlp.yaml", {"decay": 0.125})
    assert compose(["policy=kvpop_mlp"]).policy.decay == 0.125
    below = project / "deep" / "down"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert compose(["policy=kvpop_mlp"]).policy.decay == 0.125
    assert (
        compose(["policy=kvpop_mlstm"]).policy.scorer.type == "mlstm"
    )  # not in the project: the package's own


def test_no_configs_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvpop_lightning.config.files.config_roots", list)
    assert compose(["seed=3"]).seed == 3
    [problem] = problems("experiment=demo")
    assert "no 'configs' folder" in problem


def test_generate_takes_its_own_keys_bare() -> None:
    config = compose(["prompt=hello", "temperature=0.5", "policy.decay=0.5"], command="generate")
    assert (config.generate.prompt, config.generate.temperature, config.policy.decay) == ("hello", 0.5, 0.5)
    assert "prompt" in problems("prompt=hello", command="train")[0]


def test_every_setting_of_the_schema_can_be_set_by_its_key() -> None:
    """Guards the walk over the schema: each key accepts its own default, given as text."""
    words = []
    for key, setting in settings().items():
        if key not in ("experiment", *FREE_TEXT) and not isinstance(setting.default, dict):
            text = yaml.safe_dump(setting.default, default_flow_style=True, width=1e9).split("\n")[0]
            words.append(f"{key}={text}")
    assert len(words) > 80
    assert compose(words) == compose([])


@pytest.mark.parametrize(
    ("scorer", "delay", "inputs"),
    [
        ("mlp", "null", "kv_hidden"),
        ("mlstm", "null", "kv"),
        ("mlstm", "3", "kv"),
        ("mlstm", "0", "kv_hidden"),
    ],
)
def test_inputs_auto_reads_the_hidden_state_where_it_costs_no_memory(scorer, delay, inputs):
    from kvpop_lightning.config.policies import retrofit_options

    words = [f"policy=kvpop_{scorer}", f"policy.scorer.delay={delay}", "policy.scorer.inputs=auto"]
    assert retrofit_options(compose(words))["inputs"] == inputs
    assert retrofit_options(compose([*words, "policy.scorer.inputs=hidden"]))["inputs"] == "hidden"
