"""Whatever is wrong, a user gets one line that says so, exit code 2, and earlier files back."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_runner import SMALL, SMALL_PAIR, fail, run, succeed
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from allocmoe import apply, load_text, make_plan
from allocmoe.artifacts import Plan, Sensitivity
from allocmoe.models.load import load_tokenizer
from tiny import tiny

VERBS = ("profile", "plan", "eval", "compare", "bench", "generate", "optimize", "inspect")
Command = Callable[..., list[Any]]


def weights_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def reads_weights(*args: object, **kwargs: object) -> None:
    raise AssertionError("weights are read although the command cannot succeed")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


@pytest.fixture
def command(plan: Path, out: Path) -> Command:
    """A whole command line of each verb that reads a model."""

    def make(verb: str, model: str | Path, budget: str = "50%") -> list[Any]:
        lines: dict[str, list[Any]] = {
            "profile": [model, *SMALL, "-o", out],
            "plan": ["--method", "uniform", "--budget", budget, "--model", model, "-o", out],
            "eval": [model, "--plan", plan, *SMALL],
            "compare": [model, "--budgets", budget, *SMALL_PAIR, "-o", out],
            "bench": [model, "--plan", plan, "--runs", "1", "--decode", "1"],
            "generate": [model, "--prompt", "Some layers"],
            "optimize": [model, "--budget", budget, *SMALL_PAIR, "-o", out.with_suffix("")],
            "inspect": [model],
        }
        return [verb, *lines[verb]]

    return make


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """The model folder, to break."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


class TestModel:
    @pytest.mark.parametrize("verb", VERBS)
    def test_missing_folder(self, command: Command, tmp_path: Path, out: Path, verb: str) -> None:
        missing = tmp_path / "nothing" / "here"
        assert f"there is no folder {missing}" in fail(*command(verb, missing))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("verb", sorted(set(VERBS) - {"inspect"}))
    def test_file_instead_of_a_folder(self, command: Command, text_file: Path, verb: str) -> None:
        assert f"{text_file} is a file" in fail(*command(verb, text_file))

    @pytest.mark.parametrize("verb", VERBS)
    def test_folder_without_config(self, command: Command, tmp_path: Path, verb: str) -> None:
        assert f"{tmp_path} is no model folder: it has no config.json" in fail(
            *command(verb, tmp_path)
        )

    def test_cut_config(self, command: Command, copy: Path) -> None:
        (copy / "config.json").write_text('{"model_type": "olm')
        assert "config.json" in fail(*command("inspect", copy))
        assert str(copy) in fail(*command("profile", copy))

    @pytest.mark.parametrize("verb", VERBS)
    def test_dense_model(
        self, command: Command, make_folder: Callable[..., Path], verb: str
    ) -> None:
        config = transformers.LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        dense = make_folder(transformers.LlamaForCausalLM(config))
        line = fail(*command(verb, dense))
        assert "(llama) is not a Mixture-of-Experts model" in line

    @pytest.mark.parametrize("verb", VERBS)
    @pytest.mark.parametrize(
        ("family", "reason"),
        [
            ("llama4", "its router scores every expert densely"),
            ("jetmoe", "its experts do not go through the common experts call"),
            ("switch_transformers", "it is an encoder-decoder"),
        ],
    )
    def test_refused_family(
        self,
        command: Command,
        tokenizer: PreTrainedTokenizerFast,
        tmp_path: Path,
        family: str,
        reason: str,
        verb: str,
    ) -> None:
        folder = tmp_path / "refused"
        tiny(family).config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        line = fail(*command(verb, folder))
        assert f"the family {family} is not supported: {reason}" in line

    @pytest.mark.parametrize("verb", ["profile", "inspect"])
    def test_unknown_hub_id_offline(
        self, command: Command, monkeypatch: pytest.MonkeyPatch, verb: str
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "nobody/no-such-model" in fail(*command(verb, "nobody/no-such-model"))

    @pytest.mark.parametrize("verb", ["profile", "eval", "compare", "generate", "optimize"])
    def test_no_tokenizer(self, command: Command, copy: Path, verb: str) -> None:
        for file in copy.glob("tokenizer*"):
            file.unlink()
        line = fail(*command(verb, copy))
        assert f"{copy} has no tokenizer" in line
        assert "tokenizer.json" in line

    @pytest.mark.parametrize("verb", ["inspect", "profile"])
    @pytest.mark.parametrize(
        "change", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"hidden_act": "none such"}]
    )
    def test_config_that_makes_no_model(
        self, command: Command, copy: Path, verb: str, change: dict[str, Any]
    ) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | change))
        assert fail(*command(verb, copy)).startswith(str(copy))

    @pytest.mark.parametrize("verb", ["profile", "eval", "generate", "analyze", "naee"])
    def test_tokenizer_larger_than_the_embedding(
        self, command: Command, make_folder: Callable[..., Path], plan: Path, out: Path, verb: str
    ) -> None:
        folder = make_folder(tiny("olmoe", vocab_size=64))
        naee = ["plan", "--method", "naee", "--budget", "50%", "--model", folder]
        words = {
            "analyze": ["analyze", folder, "--plan", plan, *SMALL, "-o", out],
            "naee": [*naee, *SMALL, "-o", out],
        }
        line = fail(*(words[verb] if verb in words else command(verb, folder)))
        assert "the model's embedding has 64 rows" in line

    def test_no_weights(self, command: Command, copy: Path) -> None:
        weights_of(copy).unlink()
        assert f"{copy} cannot be loaded" in fail(*command("profile", copy))

    def test_cut_weights(self, command: Command, copy: Path) -> None:
        weights = weights_of(copy)
        weights.write_bytes(weights.read_bytes()[:-1000])
        assert f"{copy} cannot be loaded" in fail(*command("profile", copy))

    def test_weights_that_lack_a_tensor(self, command: Command, copy: Path) -> None:
        tensors = load_file(weights_of(copy))
        lost = next(name for name in tensors if "layers.2" in name and "gate." in name)
        del tensors[lost]
        save_file(tensors, weights_of(copy), {"format": "pt"})
        assert "layers.2" in fail(*command("profile", copy))

    def test_weights_of_another_shape(self, command: Command, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
        assert f"{copy} cannot be loaded" in fail(*command("profile", copy))


class TestText:
    def test_shorter_than_one_sequence(self, model: Path, text_file: Path, out: Path) -> None:
        options = ["--text", text_file, "--length", "100000", "-o", out]
        line = fail("profile", model, *options)
        assert str(text_file) in line
        assert "too few for one sequence of 100000" in line

    def test_too_short_to_measure_on(self, model: Path, text_file: Path, tmp_path: Path) -> None:
        options = ["--budget", "50%", "--text", text_file, "--length", "32", "-o", tmp_path / "o"]
        assert "too few" in fail("optimize", model, *options, "--sequences", "5000")

    def test_missing_file(self, model: Path, tmp_path: Path, out: Path) -> None:
        line = fail("profile", model, "--text", tmp_path / "none.txt", *SMALL, "-o", out)
        assert "none.txt" in line
        assert "builtin" in line

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("latin.txt", b"caf\xe9 " * 500, "not UTF-8"),
            ("empty.txt", b"", "0 tokens"),
            ("cut.jsonl", b'{"text": "one"}\n{"text": ', "cut.jsonl:2: not JSON"),
            ("other.jsonl", b'{"body": "one"}\n', "other.jsonl:1: expected"),
        ],
    )
    def test_unreadable_file(
        self, model: Path, tmp_path: Path, out: Path, name: str, content: bytes, words: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        assert words in fail("profile", model, "--text", tmp_path / name, *SMALL, "-o", out)

    @pytest.mark.parametrize(
        "options", [("--sequences", "0"), ("--length", "1"), ("--batch-size", "0")]
    )
    def test_nothing_to_read(self, model: Path, out: Path, options: tuple[str, str]) -> None:
        fail("profile", model, *SMALL, *options, "-o", out)

    @pytest.mark.parametrize("spelling", ["prose.txt", "./prose.txt"])
    def test_choosing_by_the_text_profiled_on(
        self,
        model: Path,
        text_file: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        spelling: str,
    ) -> None:
        """Its next sequences are taken, or it is refused, however the file is spelled."""
        monkeypatch.chdir(text_file.parent)
        options = ["--budget", "50%", "--contexts", "single", "--length", "32", "-o", tmp_path]
        texts = ["--text", "prose.txt", "--sequences", "2", "--eval-sequences", "3"]
        words = ["optimize", model, *options, *texts]
        text = succeed(*words, "--json").json["evaluation"]["text"]
        ran = run(*words, "--eval-text", spelling, "--json")
        if ran.code == 0:
            assert ran.json["evaluation"]["text"]["sha256"] == text["sha256"]
        else:
            assert "text" in ran.error

    def test_longer_than_the_positions(
        self, make_folder: Callable[..., Path], plan: Path, out: Path
    ) -> None:
        folder = make_folder(tiny("olmoe", vocab_size=300, max_position_embeddings=31))
        note = "32 tokens are longer than the 31 positions"
        assert succeed("profile", folder, *SMALL, "-o", out).err.count(note) == 1
        assert succeed("eval", folder, "--plan", plan, *SMALL).err.count(note) == 1
        fitting = ["--sequences", "4", "--length", "31"]
        assert "positions" not in succeed("eval", folder, "--plan", plan, *fitting).err


class TestBudget:
    RANGE = "4..16 in total, 25%..100%, 1/layer..4/layer"

    @pytest.mark.parametrize("verb", ["plan", "optimize", "compare"])
    @pytest.mark.parametrize("budget", ["3", "17", "101%", "10%", "0.5/layer", "5/layer", "-8"])
    def test_out_of_range(
        self, command: Command, model: Path, out: Path, verb: str, budget: str
    ) -> None:
        line = fail(*command(verb, model, budget))
        assert budget in line
        assert self.RANGE in line
        assert not out.exists()

    @pytest.mark.parametrize("verb", ["plan", "optimize", "compare"])
    @pytest.mark.parametrize("budget", ["half", "8 experts", "8/token", "nan", "1e999", "%"])
    def test_garbage(
        self, command: Command, model: Path, out: Path, verb: str, budget: str
    ) -> None:
        line = fail(*command(verb, model, budget))
        assert budget in line
        assert "50%" in line or self.RANGE in line
        assert not out.exists()

    def test_range_is_checked_before_weights_are_read(
        self, command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", reads_weights)
        for verb in ("plan", "optimize", "compare"):
            assert "out of range" in fail(*command(verb, model, "99"))

    def test_around_needs_a_budget(self, model: Path, out: Path) -> None:
        assert "needs the budget" in fail(
            "profile", model, "--context", "around", *SMALL, "-o", out
        )
        fail("profile", model, "--budget", "50%", *SMALL, "-o", out)
        around = ["--context", "around", "--budget", "99"]
        assert self.RANGE in fail("profile", model, *around, *SMALL, "-o", out)


class TestArtefact:
    @pytest.mark.parametrize(
        ("other", "difference"),
        [
            (dict(family="olmoe", num_hidden_layers=3), "4 MoE layers, here 3"),
            (dict(family="olmoe", top_k=2), "k_orig 4 in MoE layer 0, here 2"),
            (dict(family="olmoe", num_experts=6), "num_experts 8 in MoE layer 0, here 6"),
            (dict(family="qwen3_moe"), "family olmoe, here qwen3_moe"),
        ],
    )
    def test_of_another_model(
        self,
        make_folder: Callable[[PreTrainedModel], Path],
        model: Path,
        plan: Path,
        sensitivity: Path,
        out: Path,
        other: dict[str, Any],
        difference: str,
    ) -> None:
        folder = make_folder(tiny(**other, vocab_size=300))
        for line in (
            fail("eval", folder, "--plan", plan, *SMALL),
            fail("bench", folder, "--plan", plan),
            fail("generate", folder, "--plan", plan, "--prompt", "Some layers"),
        ):
            assert f"made for {model} and does not fit {folder}: {difference}" in line
        source = ["--sensitivity", sensitivity, "--model", folder]
        line = fail("plan", "--method", "alloc-l", "--budget", "50%", *source, "-o", out)
        assert f"of {model}, not of {folder}: {difference}" in line

    def test_of_another_model_is_refused_before_weights_are_read(
        self,
        make_folder: Callable[[PreTrainedModel], Path],
        plan: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder = make_folder(tiny("olmoe", vocab_size=300, num_hidden_layers=3))
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", reads_weights)
        assert "here 3" in fail("eval", folder, "--plan", plan, *SMALL)

    def test_cut(self, model: Path, plan: Path, sensitivity: Path, tmp_path: Path) -> None:
        for whole, commands in (
            (plan, [["eval", model, *SMALL, "--plan"], ["inspect"]]),
            (
                sensitivity,
                [
                    ["plan", "--method", "alloc-l", "--budget", "8", "-o", "p", "--sensitivity"],
                    ["compare", model, *SMALL_PAIR, "-o", tmp_path / "c.json", "--sensitivity"],
                    ["inspect"],
                ],
            ),
        ):
            cut = tmp_path / f"cut-{whole.name}"
            cut.write_text(whole.read_text()[:200])
            for words in commands:
                line = fail(*words, cut)
                assert f"{cut}: not JSON, or cut off" in line

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"colour": "red"}, "unknown key 'colour'"),
            ({"schema_version": 2}, "schema_version is 2, this allocmoe reads 1"),
            ({"kind": "allocmoe.sensitivity"}, "kind is 'allocmoe.sensitivity'"),
            ({"budget": "8"}, "budget: expected int, found str '8'"),
            ({"budget": 7}, "budget_used 8.0 exceeds the budget 7"),
            ({"layer_budgets": [2, 2, 2]}, "layer_budgets has 3 entries for 4 MoE layers"),
            ({"layer_budgets": [2, 2, 2, 5]}, "layer_budgets[3] is 5.0, outside 0..4"),
            ({"method": "magic"}, "method: 'magic' is not one of alloc-moe"),
        ],
    )
    def test_changed_plan(
        self, model: Path, plan: Path, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        file = tmp_path / "changed.json"
        file.write_text(json.dumps(json.loads(plan.read_text()) | change))
        line = fail("eval", model, "--plan", file, *SMALL)
        assert line.startswith(f"{file}: ")
        assert words in line

    def test_missing_key(self, model: Path, plan: Path, tmp_path: Path) -> None:
        document = json.loads(plan.read_text())
        del document["token"]["scope"]
        file = tmp_path / "lacking.json"
        file.write_text(json.dumps(document))
        assert f"{file}: token: the key 'scope' is missing" in fail("inspect", file)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"text": None}, "text is null"),
            ({"rows": []}, "rows is empty"),
            ({"distinct_per_step": []}, "distinct_per_step of unmodified has 0 entries for 4"),
            ({"realised_per_layer": [1]}, "realised_per_layer of unmodified has 1 entries for 4"),
        ],
    )
    def test_changed_evaluation(
        self, model: Path, plan: Path, out: Path, change: dict[str, Any], words: str
    ) -> None:
        document = succeed("eval", model, "--plan", plan, *SMALL, "--json").json
        (document if change.keys() <= document.keys() else document["rows"][0]).update(change)
        out.write_text(json.dumps(document))
        assert f"{out}: {words}" in fail("inspect", out)

    def test_missing_file(self, model: Path, tmp_path: Path) -> None:
        file = tmp_path / "none.json"
        assert f"{file}: no such file" in fail("eval", model, "--plan", file, *SMALL)
        assert f"{file}: no such file" in fail("inspect", file)

    def test_something_else(self, model: Path, text_file: Path) -> None:
        assert "not an allocmoe artefact" in fail("inspect", model / "config.json")
        assert str(text_file) in fail("inspect", text_file)
        assert str(model) in fail("inspect", weights_of(model))

    def test_cut_profile_of_an_earlier_optimize(self, model: Path, tmp_path: Path) -> None:
        file = tmp_path / "sensitivity-paper.json"
        file.write_text('{"kind": "allocmoe.sens')
        options = ["--budget", "50%", *SMALL_PAIR, "-o", tmp_path]
        assert f"{file}: not JSON, or cut off" in fail("optimize", model, *options)


class TestOption:
    @pytest.mark.parametrize("method", ["alloc-l", "alloc-moe"])
    def test_method_needs_a_sensitivity(self, model: Path, out: Path, method: str) -> None:
        options = ["--method", method, "--budget", "50%", "-o", out]
        for more in (["--model", model], []):
            assert "needs a --sensitivity" in fail("plan", *options, *more)

    def test_the_scope_that_needs_a_model(self, sensitivity: Path, out: Path) -> None:
        options = ["--method", "alloc-moe", "--budget", "50%", "--sensitivity", sensitivity]
        line = fail("plan", *options, "--scope", "threshold", "-o", out)
        assert "the scope threshold needs --model" in line

    def test_a_model_that_does_not_renormalise(self, model: Path, out: Path) -> None:
        options = ["--method", "uniform", "--budget", "50%", "--model", model, "-o", out]
        assert "has no meaning here" in fail("plan", *options, "--renormalise-over", "2")

    @pytest.mark.parametrize("method", ["lexi", "naee", "dynamic-moe"])
    def test_method_needs_a_model(self, sensitivity: Path, out: Path, method: str) -> None:
        options = ["--method", method, "--budget", "50%", "-o", out]
        assert "needs --model" in fail("plan", *options, "--sensitivity", sensitivity)

    def test_alloc_l_from_a_profile_with_a_token_rule(self, model: Path, out: Path) -> None:
        profiled = out.with_name("s.json")
        rule = ["--token-rule", "batch", "--grid", "1"]
        succeed("profile", model, *SMALL, *rule, "-o", profiled)
        options = ["--budget", "50%", "--sensitivity", profiled, "-o", out]
        assert "measured with alloc-t/batch on" in fail("plan", "--method", "alloc-l", *options)

    def test_unknown_method(self, model: Path, out: Path) -> None:
        for words in (
            ["plan", "--method", "magic", "--budget", "50%", "--model", model, "-o", out],
            ["compare", model, "--methods", "uniform,magic", "-o", out],
        ):
            line = fail(*words)
            assert "unknown method 'magic'" in line
            assert "alloc-moe" in line

    def test_unknown_context(self, model: Path, tmp_path: Path) -> None:
        options = ["--budget", "50%", "--contexts", "paper,magic", "-o", tmp_path]
        assert "unknown context 'magic'" in fail("optimize", model, *options)

    @pytest.mark.parametrize("dtype", ["float99", "int8", "Tensor", "float8_e4m3fn"])
    def test_unknown_dtype(self, model: Path, out: Path, dtype: str) -> None:
        line = fail("profile", model, "--dtype", dtype, *SMALL, "-o", out)
        assert dtype in line
        assert "bfloat16" in line

    @pytest.mark.parametrize("device", ["cuda", "cuda:0"])
    def test_cuda_where_there_is_none(
        self, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        line = fail("profile", model, "--device", device, *SMALL, "-o", out)
        assert f"the device {device} was asked for" in line

    def test_device_is_checked_before_weights_are_read(
        self, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", reads_weights)
        assert "'gpu'" in fail("profile", model, "--device", "gpu", *SMALL, "-o", out)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--context", "around"], "needs the budget"),
            (["--budget", "50%"], "takes no budget"),
            (["--grid", "5"], "grid of k must lie in 1..4"),
            (["--grid", "1,1.33333", "--token-rule", "batch"], "round it"),
            (["--batch-size", "0"], "batch_size must be 1 or more"),
            (["-o", "/dev/null/s.json"], "cannot be written"),
            (["--token-rule", "batch", "--k-base", "7"], "at most the model's own k of 4: 7"),
        ],
    )
    def test_profile_is_refused_before_weights_are_read(
        self,
        command: Command,
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: list[str],
        words: str,
    ) -> None:
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", reads_weights)
        assert words in fail(*command("profile", model), *options)

    def test_sweeps_are_refused_before_weights_are_read(
        self, model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = tmp_path / "uniform.json"
        succeed("plan", "--method", "uniform", "--budget", "50%", "--model", model, "-o", plan)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", reads_weights)
        line = ["analyze", model, "--plan", plan, *SMALL, "-o", out]
        assert "k_base is swept under alloc-t" in fail(*line, "--sweep-k-base")
        assert "measure on other text" in fail(*line, "--sweep-texts", "builtin:heldout")

    @pytest.mark.parametrize("grid", ["0", "5", "1.5", "nan", "inf"])
    def test_grid_outside_the_model(self, model: Path, out: Path, grid: str) -> None:
        assert "grid" in fail("profile", model, "--grid", grid, *SMALL, "-o", out)

    @pytest.mark.parametrize("method", ["naee", "dynamic-moe"])
    def test_no_batch_to_calibrate_on(self, model: Path, out: Path, method: str) -> None:
        options = ["--method", method, "--budget", "50%", "--model", model, *SMALL, "-o", out]
        assert "batch_size must be 1 or more" in fail("plan", *options, "--batch-size", "0")

    def test_measured_on_the_text_that_was_profiled(self, model: Path, out: Path) -> None:
        profiled = out.with_name("profiled.json")
        heldout = ["--text", "builtin:heldout", "--sequences", "3", "--length", "32"]
        succeed("profile", model, *heldout, "-o", profiled)
        line = ["compare", model, "--budgets", "50%", *SMALL_PAIR, "-o", out]
        assert "the very text to measure on" in fail(*line, "--sensitivity", profiled)

    def test_negative_k_base(self, model: Path, out: Path) -> None:
        options = ["--method", "alloc-t", "--budget", "50%", "--model", model, "-o", out]
        assert "k_base" in fail("plan", *options, "--k-base", "-1")

    def test_one_plan_twice(self, model: Path, plan: Path) -> None:
        assert "given twice" in fail("eval", model, "--plan", plan, "--plan", plan, *SMALL)

    @pytest.mark.parametrize(
        "options", [("--prompt", ""), ("--prompt", "a", "--max-new-tokens", "0")]
    )
    def test_nothing_to_generate(self, model: Path, options: tuple[str, ...]) -> None:
        fail("generate", model, *options)

    @pytest.mark.parametrize(
        "words", [[], ["magic"], ["plan"], ["profile", "--length", "many"], ["models", "--magic"]]
    )
    def test_usage(self, words: list[str]) -> None:
        ran = run(*words)
        assert ran.code == 2
        assert ran.out == ""
        assert ran.err.splitlines()[-1].startswith("allocmoe")
        assert ": error: " in ran.err.splitlines()[-1]


class TestOutput:
    @pytest.mark.parametrize("verb", ["profile", "plan", "compare", "optimize", "eval", "bench"])
    def test_inside_a_file(self, command: Command, model: Path, out: Path, verb: str) -> None:
        out.write_text("mine")
        out.with_suffix("").write_text("mine too")
        words = command(verb, model)
        if "-o" in words:
            words = words[: words.index("-o")]
        inside = out if verb != "optimize" else out.with_suffix("")
        line = fail(*words, "-o", inside / "inner")
        assert str(inside) in line
        assert "cannot be written" in line
        assert (out.read_text(), out.with_suffix("").read_text()) == ("mine", "mine too")

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    @pytest.mark.parametrize("verb", ["profile", "plan", "compare", "optimize"])
    def test_full_disk_keeps_earlier_files(
        self,
        command: Command,
        model: Path,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        verb: str,
        call: str,
    ) -> None:
        words = command(verb, model)
        if verb == "compare":
            words += ["--methods", "uniform"]
        succeed(*words)
        before = {file: file.read_bytes() for file in out.parent.rglob("*.*")}
        assert before
        monkeypatch.setattr(os, call, no_space)
        assert "cannot be written: No space left on device" in fail(*words)
        assert {file: file.read_bytes() for file in out.parent.rglob("*.*")} == before

    def test_table_does_not_replace_the_result(self, model: Path, tmp_path: Path) -> None:
        """A result called .md would be overwritten by its own table."""
        file = tmp_path / "compare.md"
        options = ["--methods", "uniform", *SMALL_PAIR, "-o", file]
        ran = run("compare", model, *options)
        if ran.code == 0:
            assert json.loads(file.read_text())["kind"] == "allocmoe.evaluation"
        else:
            assert ".md" in ran.error


class TestNotFinite:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_unmodified_model(
        self, make_folder: Callable[[PreTrainedModel], Path], plan: Path, out: Path, value: float
    ) -> None:
        broken = tiny("olmoe", vocab_size=300)
        with torch.no_grad():
            broken.model.layers[1].mlp.experts.down_proj[0].fill_(value)
        folder = make_folder(broken)
        line = fail("profile", folder, *SMALL, "-o", out)
        assert "the perplexity of the unmodified model is" in line
        assert "unmodified is" in fail("eval", folder, "--plan", plan, *SMALL)
        assert list(out.parent.iterdir()) == []

    @pytest.mark.parametrize("method", ["naee", "dynamic-moe", "alloc-t"])
    def test_routing(
        self, make_folder: Callable[[PreTrainedModel], Path], plan: Path, out: Path, method: str
    ) -> None:
        broken = tiny("olmoe", vocab_size=300)
        with torch.no_grad():
            broken.model.layers[1].mlp.experts.down_proj[0].fill_(float("nan"))
        folder, hint = make_folder(broken), "the weights themselves may be broken"
        options = ["--method", method, "--scope", "threshold", "--budget", "50%", "-o", out]
        assert hint in fail("plan", *options, "--model", folder, *SMALL)
        assert hint in fail("analyze", folder, "--plan", plan, *SMALL, "-o", out)
        assert list(out.parent.iterdir()) == []

    def test_names_the_layer_and_k(
        self, make_folder: Callable[[PreTrainedModel], Path], out: Path
    ) -> None:
        """An expert that only runs when earlier layers run fewer of theirs is broken."""
        broken = tiny("olmoe", vocab_size=300, num_experts=64)
        with torch.no_grad():
            for layer in broken.model.layers:
                layer.mlp.experts.down_proj.mul_(20)
        folder = make_folder(broken)
        unused = self.experts_of_last_layer(broken, folder, "25%")
        unused -= self.experts_of_last_layer(broken, folder, "100%")
        with torch.no_grad():
            broken.model.layers[3].mlp.experts.down_proj[min(unused)].fill_(float("nan"))
        broken.save_pretrained(folder)
        line = fail("profile", folder, "--sequences", "1", "--length", "8", "-o", out)
        assert "the perplexity at MoE layer 0, k=1, is nan" in line

    @staticmethod
    def experts_of_last_layer(model: PreTrainedModel, folder: Path, budget: str) -> set[int]:
        """The experts that run there with a uniform budget, on the text that is profiled."""
        text = load_text("builtin", load_tokenizer(str(folder)), sequences=1, length=8)
        ran: set[int] = set()
        hook = model.model.layers[3].mlp.experts.register_forward_pre_hook(
            lambda module, args: ran.update(args[1].flatten().tolist())
        )
        with apply(model, make_plan("uniform", budget, model=model)), torch.no_grad():
            model(input_ids=text.ids)
        hook.remove()
        return ran


class TestResume:
    @pytest.fixture
    def partial(self, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Two rows of a profile whose disk became full."""
        self.stop_after(2, monkeypatch)
        assert "No space left" in run("profile", model, *SMALL, "-o", out).error
        monkeypatch.undo()
        file = Path(f"{out}.partial")
        assert len(json.loads(file.read_text())["rows"]) == 2
        assert not out.exists()
        return file

    @staticmethod
    def stop_after(num_writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        fsync, left = os.fsync, [num_writes]

        def write(descriptor: int) -> None:
            if left[0] == 0:
                no_space()
            left[0] -= 1
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", write)

    def test_goes_on(self, model: Path, sensitivity: Path, partial: Path, out: Path) -> None:
        succeed("profile", model, *SMALL, "-o", out, "--resume")
        assert Sensitivity.load(out).perplexity == Sensitivity.load(sensitivity).perplexity
        assert not partial.exists()

    def test_goes_on_in_another_folder(
        self, model: Path, sensitivity: Path, partial: Path, out: Path, tmp_path: Path
    ) -> None:
        moved = shutil.copytree(model, tmp_path / "moved")
        succeed("profile", moved, *SMALL, "-o", out, "--resume")
        assert Sensitivity.load(out).perplexity == Sensitivity.load(sensitivity).perplexity

    def test_starts_where_there_is_nothing_to_resume(self, model: Path, out: Path) -> None:
        succeed("profile", model, *SMALL, "-o", out, "--resume")
        assert Sensitivity.load(out).model.k_orig == (4, 4, 4, 4)

    def test_refuses_without_being_asked(self, model: Path, partial: Path, out: Path) -> None:
        before = partial.read_bytes()
        line = fail("profile", model, *SMALL, "-o", out)
        assert str(partial) in line
        assert "--resume" in line
        assert partial.read_bytes() == before
        assert not out.exists()

    @pytest.mark.parametrize(
        ("options", "changed"),
        [
            (("--text", "builtin:heldout"), "text.sha256"),
            (("--sequences", "3"), "text.sha256"),
            (("--batch-size", "2"), "batch_size has changed from 4 to 2"),
            (("--context", "single"), "context.name has changed from paper to single"),
            (("--token-rule", "batch"), "token.rule has changed from none to alloc-t"),
            (("--grid", "1,2"), "ks"),
            (("--dtype", "bfloat16"), "dtype"),
        ],
    )
    def test_refuses_other_settings(
        self, model: Path, partial: Path, out: Path, options: tuple[str, str], changed: str
    ) -> None:
        before = partial.read_bytes()
        line = fail("profile", model, *SMALL, *options, "-o", out, "--resume")
        assert f"{partial}: cannot resume, " in line
        assert changed in line
        assert partial.read_bytes() == before

    def test_refuses_another_model(
        self, make_folder: Callable[[PreTrainedModel], Path], partial: Path, out: Path
    ) -> None:
        for other, changed in (
            (tiny("olmoe", vocab_size=300, seed=1), "model.fingerprint"),
            (tiny("olmoe", vocab_size=300, top_k=2), "model.k_orig"),
            (tiny("qwen3_moe", vocab_size=300), "model.family has changed from olmoe to qwen3_moe"),
        ):
            line = fail("profile", make_folder(other), *SMALL, "-o", out, "--resume")
            assert changed in line
        assert partial.exists()

    @pytest.mark.parametrize(
        "content", ['{"kind": "allocmoe.pro', "[]", '{"kind": "allocmoe.profile-in-progress"}']
    )
    def test_refuses_a_broken_partial_file(
        self, model: Path, partial: Path, out: Path, content: str
    ) -> None:
        partial.write_text(content)
        assert str(partial) in fail("profile", model, *SMALL, "-o", out, "--resume")
        assert partial.read_text() == content

    def test_optimize_goes_on(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # the whole of the first profile is four rows and the result, then comes half of the second
        words = ["optimize", model, "--budget", "50%", *SMALL_PAIR, "-o", tmp_path / "o"]
        self.stop_after(7, monkeypatch)
        assert "No space left" in run(*words).error
        monkeypatch.undo()
        assert (tmp_path / "o" / "sensitivity-paper.json").exists()
        assert (tmp_path / "o" / "sensitivity-single.json.partial").exists()
        assert "--resume" in fail(*words)
        ran = succeed(*words, "--resume")
        assert ran.err.count("used again") == 1
        assert Plan.load(tmp_path / "o" / "plan.json").budget == 8
        assert list((tmp_path / "o").glob("*.partial")) == []
