"""Small tasks of lm-eval in a folder, with their data beside them."""

from __future__ import annotations

import json
from pathlib import Path

# contexts and answers of many lengths, so that batches are padded; <|endoftext|> is token 0 of the
# bundled model, which is what lm-eval pads with
CHOICES = [
    ("A", [" function", " list of all the names that a module defines"], 0),
    ("The first argument of a method is", [" self", " the class in which it was defined", " 3"], 0),
    ("An expression that is never evaluated", [" is an error", " is"], 1),
    ("The end<|endoftext|>", [" of", " a", "<|endoftext|>"], 2),
    ("When a generator is closed, its", [" frame", " next value is returned to the caller"], 1),
]
LAST_WORDS = [
    ("The global statement is a declaration which holds for the entire current code", "block"),
    ("If the name is not found, a NameError exception is", "raised"),
    ("Return the", "value"),
    ("A class definition is an executable", "statement"),
]
QUESTIONS = [
    ("The keyword that defines a function is", "def"),
    ("Exceptions are handled by", "try"),
    ("The name of the value that stands for nothing, which every function returns is", "None"),
]
_TASKS = {
    "choices": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: choices
        doc_to_target: answer
        target_delimiter: ""
        """,
    "last_word": """
        output_type: loglikelihood
        doc_to_text: "{{question}}"
        doc_to_target: "{{answer}}"
        metric_list:
          - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
          - {metric: acc, aggregation: mean, higher_is_better: true}
        """,
    "answers": r"""
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{answer}}"
        generation_kwargs: {until: ["\n"], max_gen_toks: 5, do_sample: false}
        metric_list:
          - {metric: exact_match, aggregation: mean, higher_is_better: true}
        """,
}
NAMES = tuple(_TASKS)


def write_tasks(folder: Path) -> Path:
    """`choices`, `last_word` and `answers` in `folder`."""
    data = {
        "choices": [dict(question=q, choices=c, answer=a) for q, c, a in CHOICES],
        "last_word": [dict(question=q, answer=a) for q, a in LAST_WORDS],
        "answers": [dict(question=q, answer=a) for q, a in QUESTIONS],
    }
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_task(folder, name)
    return folder


def write_task(folder: Path, kind: str, name: str | None = None, extra: str = "") -> None:
    """The task `kind`, under another name and with further lines if wanted."""
    lines = [
        f"task: {name or kind}",
        "dataset_path: json",
        "test_split: test",
        f"dataset_kwargs: {{data_files: {{test: {folder / kind}.jsonl}}}}",
        *(line[8:] for line in _TASKS[kind].splitlines()),
        extra,
    ]
    (folder / f"{name or kind}.yaml").write_text("\n".join(lines))
