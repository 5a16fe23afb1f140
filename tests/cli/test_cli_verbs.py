"""Every verb does what its help says, on a tiny model."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from cli_runner import SMALL, SMALL_PAIR, Ran, run, succeed
from transformers import PreTrainedModel

from allocmoe.artifacts import Evaluation, Plan, Sensitivity, load_artifact
from allocmoe.cli.main import VERBS, make_parser
from allocmoe.planning.methods import METHODS, NEEDS_SENSITIVITY, NEEDS_WEIGHTS
from tiny import tiny

K_ORIG = (4, 4, 4, 4)
BUDGET = 7
NUM_TOKENS = 4 * 32
CONTEXTS = ("paper", "single", "around")
# what these run is fixed by the plan, whatever the text
EXACT = ("uniform", "ascending", "descending", "lexi", "alloc-l", "alloc-t", "alloc-moe")


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("this must not be called")


@pytest.fixture(scope="session")
def plans(
    model: Path, falling_sensitivity: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Ran]]:
    """The plan of every method, and the run that made it."""
    folder, made = tmp_path_factory.mktemp("plans"), {}
    for method in METHODS:
        source = ["--model", model, *SMALL]
        if method in NEEDS_SENSITIVITY:
            source = ["--sensitivity", falling_sensitivity]
        file = folder / f"{method}.json"
        options = ["--method", method, "--budget", str(BUDGET), "-o", file, "--json"]
        made[method] = file, succeed("plan", *options, *source)
    return made


@pytest.fixture(scope="session")
def evaluated(
    model: Path, plans: dict[str, tuple[Path, Ran]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Ran]:
    file = tmp_path_factory.mktemp("evaluated") / "evaluation.json"
    asked = [word for path, _ in plans.values() for word in ("--plan", path)]
    return file, succeed("eval", model, *asked, *SMALL, "-o", file, "--json")


@pytest.fixture(scope="session")
def compared(
    model: Path, falling_sensitivity: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Ran]:
    file = tmp_path_factory.mktemp("compared") / "table.json"
    source = ["--sensitivity", falling_sensitivity, "--budgets", "75%,8,1.75/layer"]
    return file, succeed("compare", model, *source, *SMALL_PAIR, "-o", file, "--json")


@pytest.fixture(scope="session")
def optimized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    folder = tmp_path_factory.mktemp("optimized") / "half"
    return folder, succeed(
        "optimize", model, "--budget", "50%", *SMALL_PAIR, "-o", folder, "--json"
    )


class TestProfile:
    def test_prints_what_it_writes(self, profiled: tuple[Path, Ran]) -> None:
        file, ran = profiled
        written = Sensitivity.load(file)
        assert ran.json == json.loads(file.read_text()) == written.to_json()
        assert written.model.k_orig == K_ORIG
        assert written.text is not None
        assert (written.text.num_sequences, written.text.sequence_length) == (4, 32)
        assert written.context.name == "paper"

    def test_leaves_nothing_else_behind(self, sensitivity: Path) -> None:
        assert [file.name for file in sensitivity.parent.iterdir()] == [sensitivity.name]

    def test_rows_meet_where_the_method_says(self, sensitivity: Path) -> None:
        measured = Sensitivity.load(sensitivity)
        for row, deeper in zip(measured.perplexity, measured.perplexity[1:], strict=False):
            assert row[-1] == pytest.approx(deeper[0], rel=1e-12)
        assert measured.perplexity[-1][-1] == pytest.approx(measured.base_perplexity, rel=1e-12)

    def test_tells_of_a_text_that_rewards_cutting(
        self, sensitivity: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = Sensitivity.load(sensitivity)
        rising = tuple(tuple(sorted(row, reverse=True)) for row in written.perplexity)
        last = (0.99 * rising[-1][-1], *rising[-1][1:])
        for rows, told in ((rising, False), ((*rising[:-1], last), True)):
            made = replace(written, perplexity=rows)
            monkeypatch.setattr(
                "allocmoe.profiling.profile.profile", lambda *a, made=made, **k: made
            )
            ran = succeed("profile", model, *SMALL, "-o", tmp_path / "s.json")
            said = " ".join(ran.err.split())
            assert ("in MoE layers 3 (-1.0%): it may be foreign to the model" in said) == told

    def test_other_contexts_token_rule_grid_and_text(
        self, model: Path, text_file: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "around.json"
        around = ["--context", "around", "--budget", "2/layer", "--token-rule", "sequence"]
        choice = ["--grid", "1,1.5,3", "--text", text_file, "--offload", "--batch-size", "3"]
        ran = succeed("profile", model, *around, *choice, *SMALL, "-o", file)
        assert ran.out == ""
        made = Sensitivity.load(file)
        assert made.context.before == made.context.after == (2.0,) * 4
        assert made.token.label == "alloc-t/sequence"
        assert set(made.ks) == {(1.0, 1.5, 3.0, 4.0)}
        assert made.text is not None
        assert made.text.source == str(text_file)

    def test_reads_jsonl(self, model: Path, text_file: Path, tmp_path: Path) -> None:
        lines = text_file.read_text().splitlines()
        jsonl = tmp_path / "prose.jsonl"
        jsonl.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        ran = [
            succeed("profile", model, "--text", file, *SMALL, "-o", tmp_path / "s.json", "--json")
            for file in (text_file, jsonl)
        ]
        assert ran[0].json["text"]["sha256"] == ran[1].json["text"]["sha256"]
        assert ran[0].json["perplexity"] == ran[1].json["perplexity"]


class TestPlan:
    @pytest.mark.parametrize("method", METHODS)
    def test_prints_what_it_writes(self, plans: dict[str, tuple[Path, Ran]], method: str) -> None:
        file, ran = plans[method]
        plan = Plan.load(file)
        assert ran.json == plan.to_json()
        assert plan.method == method
        assert (plan.budget_asked, plan.budget) == (str(BUDGET), BUDGET)
        assert plan.budget_used == pytest.approx(BUDGET)
        assert (plan.predicted_loss is not None) == (method in NEEDS_SENSITIVITY)

    @pytest.mark.parametrize(
        ("written", "total"), [("12", 12), ("50%", 8), ("2/layer", 8), ("1.75/layer", 7)]
    )
    def test_budget_in_three_forms(
        self, model: Path, tmp_path: Path, written: str, total: int
    ) -> None:
        file = tmp_path / "plan.json"
        options = ["--method", "uniform", "--budget", written, "--model", model, "-o", file]
        ran = succeed("plan", *options)
        assert ran.out == ""
        assert str(file) in ran.err.replace("\n", "")
        plan = Plan.load(file)
        assert plan.budget == sum(plan.layer_budgets) == total
        assert plan.budget_asked == written

    @pytest.mark.parametrize("method", sorted(set(METHODS) - NEEDS_WEIGHTS - NEEDS_SENSITIVITY))
    def test_reads_no_weights_where_none_are_needed(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
        file = tmp_path / "plan.json"
        succeed("plan", "--method", method, "--budget", "50%", "--model", model, "-o", file)
        assert Plan.load(file).model.fingerprint is None

    def test_needs_no_model_with_a_sensitivity(self, sensitivity: Path, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        source = ["--sensitivity", sensitivity, "--normalisation", "relative"]
        succeed("plan", "--method", "uniform", "--budget", "50%", *source, "-o", file)
        succeed("plan", "--method", "alloc-l", "--budget", "50%", *source, "-o", file)
        plan, measured = Plan.load(file), Sensitivity.load(sensitivity)
        assert (plan.model, plan.text) == (measured.model, measured.text)
        assert (plan.context, plan.normalisation) == ("paper", "relative")

    def test_threshold_scope(self, model: Path, falling_sensitivity: Path, tmp_path: Path) -> None:
        file = tmp_path / "plan.json"
        source = ["--sensitivity", falling_sensitivity, "--model", model, *SMALL]
        rule = ["--scope", "threshold", "--k-base", "0"]
        succeed("plan", "--method", "alloc-moe", "--budget", "50%", *source, *rule, "-o", file)
        token = Plan.load(file).token
        assert (token.label, token.k_base) == ("alloc-t/threshold", 0)
        assert token.thresholds is not None

    @pytest.mark.parametrize("search", ["exact", "evolve"])
    def test_lexi_tells_both_searches(self, model: Path, tmp_path: Path, search: str) -> None:
        file = tmp_path / "plan.json"
        options = ["--model", model, "--lexi-search", search, "-o", file]
        ran = succeed("plan", "--method", "lexi", "--budget", "9", *options)
        assert "exact optimum" in ran.err
        assert "evolutionary search" in ran.err
        assert sum(Plan.load(file).layer_budgets) == 9


class TestEval:
    def test_prints_what_it_writes(self, evaluated: tuple[Path, Ran]) -> None:
        file, ran = evaluated
        written = Evaluation.load(file)
        assert ran.json == written.to_json()
        assert [row.name for row in written.rows] == ["unmodified", *METHODS]
        base = written.rows[0]
        assert (base.realised, base.log_rise, base.kl) == (sum(K_ORIG), 0.0, 0.0)

    @pytest.mark.parametrize("method", EXACT)
    def test_realised_is_the_budget(
        self, plans: dict[str, tuple[Path, Ran]], evaluated: tuple[Path, Ran], method: str
    ) -> None:
        row = next(row for row in Evaluation.load(evaluated[0]).rows if row.name == method)
        budgets = Plan.load(plans[method][0]).layer_budgets
        exact = [round(budget * NUM_TOKENS) / NUM_TOKENS for budget in budgets]
        assert row.realised_per_layer == pytest.approx(exact, abs=1e-12)
        assert row.realised == pytest.approx(BUDGET, abs=0.5 * len(K_ORIG) / NUM_TOKENS)

    def test_writes_nothing_unless_asked(
        self, model: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        ran = succeed("eval", model, "--plan", plan, *SMALL)
        assert ran.out == ""
        assert "unmodified" in ran.err
        assert list(tmp_path.iterdir()) == []

    def test_says_that_a_plan_is_for_other_weights(
        self,
        model: Path,
        plans: dict[str, tuple[Path, Ran]],
        make_folder: Callable[[PreTrainedModel], Path],
    ) -> None:
        other = make_folder(tiny("olmoe", vocab_size=300, seed=1))
        lexi, uniform = plans["lexi"][0], plans["uniform"][0]
        ran = succeed("eval", other, "--plan", lexi, "--plan", uniform, *SMALL)
        assert "lexi was made for other weights" in ran.err
        assert "uniform was made for other weights" not in ran.err
        assert "other weights" not in succeed("eval", model, "--plan", lexi, *SMALL).err
        words = ["--plan", lexi, "--prompt", "one two", "--max-new-tokens", "1"]
        assert "other weights" in succeed("generate", other, *words).err


class TestCompare:
    def test_every_method_at_every_budget(self, compared: tuple[Path, Ran]) -> None:
        file, ran = compared
        written = Evaluation.load(file)
        assert ran.json == written.to_json()
        names = [f"{method}@{total}" for total in (12, 8, 7) for method in METHODS]
        assert [row.name for row in written.rows] == ["unmodified", *names]
        assert written.text is not None
        assert written.text.num_sequences == 3

    def test_markdown_has_the_same_rows(self, compared: tuple[Path, Ran]) -> None:
        file, _ = compared
        head, rule, *rows = file.with_suffix(".md").read_text().splitlines()
        columns = [cell.strip() for cell in head.strip("|").split("|")]
        assert set(rule) <= set("|-:")
        written = Evaluation.load(file).rows
        for line, row in zip(rows, written, strict=True):
            cells = dict(zip(columns, line.strip("|").split("|"), strict=True))
            assert cells["plan"].strip() == row.name
            assert float(cells["realised"]) == pytest.approx(row.realised, abs=0.0051)
            assert float(cells["perplexity"]) == pytest.approx(row.perplexity, rel=1e-3)

    def test_realised_is_the_budget(self, compared: tuple[Path, Ran]) -> None:
        rows = Evaluation.load(compared[0]).rows
        exact = [row for row in rows if row.method in EXACT]
        assert len(exact) == 3 * len(EXACT)
        slack = 0.5 * len(K_ORIG) / (3 * 32)
        for row in exact:
            assert row.realised == pytest.approx(row.budget, abs=slack), row.name
            assert sum(row.realised_per_layer) == pytest.approx(row.realised)
            if row.token == "none":
                assert row.realised == row.budget, row.name

    def test_profiles_where_it_has_to(self, model: Path, text_file: Path, tmp_path: Path) -> None:
        file = tmp_path / "table.json"
        choice = ["--methods", "alloc-moe,uniform", "--budgets", "50%", "--text", text_file]
        ran = succeed("compare", model, *choice, *SMALL_PAIR, "-o", file)
        assert ran.out == ""
        kept = Sensitivity.load(tmp_path / "table-sensitivity.json")
        result = Evaluation.load(file)
        assert kept.text is not None
        assert result.text is not None
        assert kept.text.sha256 != result.text.sha256
        found = {made.name for made in tmp_path.iterdir()}
        assert found == {"table.json", "table.md", "table-sensitivity.json"}


class TestGenerate:
    PROMPTS = ("A mixture of experts", "Some layers")

    def test_prints_the_continuation(self, model: Path, plan: Path) -> None:
        prompt = ["--prompt", self.PROMPTS[0], "--max-new-tokens", "4"]
        ran = succeed("generate", model, "--plan", plan, *prompt)
        assert ran.out.startswith(self.PROMPTS[0])
        assert "what ran" in ran.err

    @pytest.mark.parametrize("with_plan", [False, True])
    def test_counts_what_ran(self, model: Path, plan: Path, with_plan: bool) -> None:
        prompts = [word for prompt in self.PROMPTS for word in ("--prompt", prompt)]
        chosen = ["--plan", plan] if with_plan else []
        document = succeed(
            "generate", model, *chosen, *prompts, "--max-new-tokens", "4", "--json"
        ).json
        assert document["prompts"] == list(self.PROMPTS)
        assert len(document["texts"]) == 2
        for layer in document["activity"]:
            assert layer["activations"] == layer["tokens"] * (2 if with_plan else 4)

    def test_padding_takes_no_budget(self, model: Path, plans: dict[str, tuple[Path, Ran]]) -> None:
        prompts = [word for prompt in self.PROMPTS for word in ("--prompt", prompt)]
        chosen = ["--plan", plans["alloc-t"][0], "--max-new-tokens", "4"]
        for layer in succeed("generate", model, *chosen, *prompts, "--json").json["activity"]:
            assert layer["padding_activations"] == 0
            # a decode step of two tokens rounds 3.5 pairs to 4
            assert 1.75 <= layer["activations"] / layer["tokens"] < 1.9


class TestOptimize:
    NAMES = ("unmodified", "alloc-t", *(f"alloc-moe/{context}" for context in CONTEXTS))

    def test_keeps_the_plan_that_measures_best(self, optimized: tuple[Path, Ran]) -> None:
        folder, ran = optimized
        candidates = Evaluation.load(folder / "candidates.json")
        assert tuple(row.name for row in candidates.rows) == self.NAMES
        best = min(candidates.rows[1:], key=lambda row: row.perplexity)
        plan = Plan.load(folder / "plan.json")
        assert ran.json == {
            "best": best.name,
            "plan": plan.to_json(),
            "evaluation": candidates.to_json(),
        }
        assert best.name.partition("/")[0] == plan.method
        assert (best.name.partition("/")[2] or None) == plan.context

    def test_the_plan_measures_again_as_it_did(
        self, model: Path, optimized: tuple[Path, Ran]
    ) -> None:
        folder, ran = optimized
        text = ["--text", "builtin:heldout", "--sequences", "3", "--length", "32"]
        again = succeed("eval", model, "--plan", folder / "plan.json", *text, "--json").json
        rows = {row["name"]: row for row in ran.json["evaluation"]["rows"]}
        assert again["rows"][0] == rows["unmodified"]
        assert again["rows"][1] == rows[ran.json["best"]] | {"name": "plan"}

    def test_profiles_and_measures_on_different_text(self, optimized: tuple[Path, Ran]) -> None:
        folder, ran = optimized
        measured_on = ran.json["evaluation"]["text"]["sha256"]
        profiles = sorted(folder.glob("sensitivity-*.json"))
        assert [file.stem for file in profiles] == [
            "sensitivity-around-8",
            "sensitivity-paper",
            "sensitivity-single",
        ]
        for file in profiles:
            text = Sensitivity.load(file).text
            assert text is not None
            assert text.sha256 != measured_on

    def test_uses_its_profiles_again(
        self, model: Path, optimized: tuple[Path, Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, ran = optimized
        monkeypatch.setattr("allocmoe.planning.optimize.profile", refuse)
        options = ["--budget", "8", *SMALL_PAIR, "-o", folder, "--json"]
        again = succeed("optimize", model, *options)
        assert again.err.count("used again") == 3
        assert again.json["best"] == ran.json["best"]
        assert again.json["plan"]["layer_budgets"] == ran.json["plan"]["layer_budgets"]

    def test_another_text_is_profiled_anew(
        self, model: Path, text_file: Path, tmp_path: Path
    ) -> None:
        options = ["--budget", "8", "--contexts", "single", *SMALL_PAIR, "-o", tmp_path]
        succeed("optimize", model, *options)
        before = Sensitivity.load(tmp_path / "sensitivity-single.json")
        ran = succeed("optimize", model, *options, "--text", text_file)
        assert "used again" not in ran.err
        after = Sensitivity.load(tmp_path / "sensitivity-single.json")
        assert before.text != after.text

    def test_no_token_rule(self, model: Path, tmp_path: Path) -> None:
        options = ["--no-token-rule", "--budget", "7", *SMALL_PAIR, "-o", tmp_path]
        ran = succeed("optimize", model, *options)
        assert ran.out == ""
        names = [row.name for row in Evaluation.load(tmp_path / "candidates.json").rows]
        assert names == ["unmodified", "uniform", *(f"alloc-l/{c}" for c in CONTEXTS)]
        assert Plan.load(tmp_path / "plan.json").token.rule == "none"
        assert Sensitivity.load(tmp_path / "sensitivity-paper.json").token.rule == "none"

    def test_threshold_scope(self, model: Path, tmp_path: Path) -> None:
        options = ["--scope", "threshold", "--budget", "7", "--contexts", "paper"]
        succeed("optimize", model, *options, *SMALL_PAIR, "-o", tmp_path)
        assert Plan.load(tmp_path / "plan.json").token.label == "alloc-t/threshold"


class TestInspect:
    def test_artefacts(self, plan: Path, sensitivity: Path, evaluated: tuple[Path, Ran]) -> None:
        for file in (plan, sensitivity, evaluated[0]):
            assert succeed("inspect", file, "--json").json == load_artifact(file).to_json()
            ran = succeed("inspect", file)
            assert ran.out == ""
            assert "olmoe" in ran.err

    def test_model_folder_reads_no_weights(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
        ran = succeed("inspect", model, "--json")
        assert ran.json["model"]["k_orig"] == list(K_ORIG)
        assert ran.json["model"]["num_experts"] == [8] * 4
        assert ran.json["num_decoder_layers"] == 4
        assert "budgets from 4 to 16" in ran.err


class TestModels:
    def test_lists_families(self) -> None:
        ran = succeed("models", "--json")
        assert "olmoe" in ran.json["tested"]
        assert "llama4" in ran.json["refused"]
        assert succeed("models").out == ""


class TestHelp:
    @pytest.mark.parametrize("verb", [None, *(module.NAME for module in VERBS)])
    @pytest.mark.parametrize("columns", ["80", "200"])
    def test_ends_with_an_example_that_parses(
        self, verb: str | None, columns: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        ran = succeed(*([verb] if verb else []), "--help")
        assert ran.err == ""
        match = re.search(r"^example: (.*)\Z", ran.out, re.MULTILINE | re.DOTALL)
        assert match is not None
        program, *arguments = shlex.split(match[1])
        assert program == "allocmoe"
        if verb is not None:
            assert arguments[0] == verb
        assert make_parser().parse_args(arguments).verb == arguments[0]

    def test_names_every_verb(self) -> None:
        help_text = succeed("--help").out
        assert all(module.NAME in help_text for module in VERBS)

    def test_version(self) -> None:
        assert re.fullmatch(r"allocmoe \d+\.\d+\.\d+\S*\n", run("--version").out)


def test_numbers_are_finite_and_plain(evaluated: tuple[Path, Ran]) -> None:
    rows = evaluated[1].json["rows"]
    for row in rows:
        numbers = [row[key] for key in ("perplexity", "log_rise", "kl", "top1_agreement")]
        assert all(math.isfinite(number) for number in numbers)
