"""The items of experiments/sample as the hub would have them, written by hand.

By data set, configuration and split, with what lm-eval reads of a row.
"""

from __future__ import annotations

from typing import Any

import datasets

FERRY = (
    "A ferry moves carts between two piers and holds one cart. The ferry is at pier p0 and is "
    "empty. Cart c0 is at p0, cart c1 is at p1."
)
RETURN = "If you follow these instructions, do you return to the starting point? "
SORT = "Sort the following words alphabetically: List: "
TRUTHS = [
    {
        "question": "Can a horse read a clock?",
        "mc1_targets": {
            "choices": ["No, horses cannot read clocks.", "Yes, at noon.", "Only old horses can."],
            "labels": [1, 0, 0],
        },
        "mc2_targets": {
            "choices": [
                "No, horses cannot read clocks.",
                "No horse is known to.",
                "Yes, at noon.",
                "Only old horses can.",
            ],
            "labels": [1, 1, 0, 0],
        },
    },
    {
        "question": "What happens if you whistle in a lift?",
        "mc1_targets": {
            "choices": ["Nothing in particular happens.", "It stops."],
            "labels": [1, 0],
        },
        "mc2_targets": {
            "choices": [
                "Nothing in particular happens.",
                "Others hear you whistle.",
                "It stops.",
            ],
            "labels": [1, 1, 0],
        },
    },
]


def rows(keys: str, *values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(keys.split(), row, strict=True)) for row in values]


def labelled(text: list[str], label: str = "ABCD") -> dict[str, list[str]]:
    return {"text": text, "label": [*label][: len(text)]}


def flights(query: str, answer: str, classes: str) -> dict[str, str]:
    prices = (100, 110, 120, 130, 140)
    return {
        "query": query,
        "Answer": answer,
        **{
            f"Option {letter}": f"{{'Airline': 'Air {letter}', "
            f"'Ticket Class': '{'Economy' if kind == 'e' else 'First'}', "
            f"'Price (Dollars)': '{price}'}}"
            for letter, kind, price in zip("ABCDE", classes, prices, strict=True)
        },
    }


def problems(*asked: tuple[str, str, list[str]]) -> str:
    return str([{"question": q, "answer": a, "options": o} for q, a, o in asked])


HUB: dict[tuple[str, str | None], dict[str, list[dict[str, Any]]]] = {
    ("aps/super_glue", "boolq"): {
        "validation": rows(
            "question passage label",
            (
                "does the ferry to Brill run in winter",
                "Brill ferry -- The ferry to Brill sails from May to October. In winter the "
                "island is supplied by air.",
                0,
            ),
            (
                "can a marsh clock be wound twice",
                "Marsh clock -- A marsh clock is wound once a day, though ``nothing breaks'' if "
                "it is wound a second time.",
                1,
            ),
            (
                "is the Ponder bridge made of iron",
                "Ponder bridge -- The Ponder bridge, built of iron in two summers, carries a road "
                "and a path.",
                1,
            ),
        ),
        "train": rows(
            "question passage label",
            (
                "is the lake of Orrin salty",
                "Lake Orrin -- Lake Orrin is fed by three brooks and is used for drinking water.",
                0,
            ),
            (
                "do tin owls lay eggs",
                "Tin owl -- A tin owl is a toy of the last century that whistles when it is "
                "turned.",
                0,
            ),
        ),
    },
    ("EleutherAI/lambada_openai", "default"): {
        "test": rows(
            "text",
            (
                "Mara had looked for the key all morning. She emptied her bag, then the drawer, "
                "and there, under a letter, lay the key",
            ),
            (
                '"Is the kettle on?" asked Tom.\n\n"It has been on for an hour," said his aunt, '
                "and she lifted the kettle",
            ),
            (
                "The two of them had carried the boat to the lake, but nobody had thought of "
                "bringing an oar for the boat",
            ),
        )
    },
    ("EleutherAI/race", "high"): {
        "test": rows(
            "article problems",
            (
                "Lena sells maps at the harbour. On Sundays she closes early and draws new ones.\n"
                "Her maps show where the wind comes from, so sailors like them.",
                problems(
                    ("Lena sells   _  .", "A", ["maps", "fish", "boats", "hats"]),
                    (
                        "Why do sailors like her maps?",
                        "B",
                        [
                            "They are cheap.",
                            "They show the wind.",
                            "They are small.",
                            "They are old.",
                        ],
                    ),
                ),
            ),
            (
                "The school in Dell has one bell, and the youngest pupil rings it. Last year that "
                "was Ivo, who was always late.",
                problems(
                    (
                        "Who rings the bell?",
                        "C",
                        ["The teacher.", "A neighbour.", "The youngest pupil.", "Nobody."],
                    ),
                    (
                        "Last year the bell was probably rung   _  .",
                        "D",
                        ["twice", "early", "never", "late"],
                    ),
                ),
            ),
        )
    },
    ("allenai/sciq", None): {
        "test": rows(
            "question distractor1 distractor2 distractor3 correct_answer support",
            (
                *("What do leaves take in from the air?", "helium", "neon", "sulfur"),
                "carbon dioxide",
                "Leaves take in carbon dioxide from the air and give off oxygen.",
            ),
            ("What is frozen water called?", "steam", "fog", "brine", "ice", ""),
            (
                *("Which organ pumps blood?", "liver", "lung", "skin", "heart"),
                " The heart pumps blood through the body.",
            ),
        )
    },
    ("nyu-mll/glue", "mnli"): {
        "validation_matched": rows(
            "premise hypothesis label",
            ("The shop is open on weekdays", "The shop is open on Monday ", 0),
            ("He bought a red bicycle.", "He likes cycling.", 1),
            ("Nobody answered the door.", "Somebody answered the door", 2),
        )
    },
    ("nyu-mll/glue", "qnli"): {
        "validation": rows(
            "question sentence label",
            ("When was the mill built?", "The mill was built in 1820.", 0),
            ("Who owns the mill?", '"The mill has two wheels, and one is broken.', 1),
            ("What is the mill for?", "It grinds barley.", 0),
        )
    },
    ("nyu-mll/glue", "rte"): {
        "validation": rows(
            "sentence1 sentence2 label",
            ("Anna moved from Oslo to Bergen in May.", "Anna lived in Oslo.", 0),
            ('The "Blue Line" carries goods.', "The Blue Line carries passengers.", 1),
            ("Both brothers became bakers.", "The brothers bake.", 0),
        ),
        "train": rows(
            "sentence1 sentence2 label",
            ("It rained all week.", "It rained on Tuesday.", 0),
            ("The museum opened in 1990.", "The museum has closed.", 1),
        ),
    },
    ("allenai/ai2_arc", "ARC-Easy"): {
        "test": rows(
            "question choices answerKey",
            (
                "Which of these is a source of light?",
                labelled(["a lamp", "a mirror", "a stone", "a chair"]),
                "A",
            ),
            (
                "What do plants need to grow?",
                labelled(["salt", "smoke", "water", "plastic"], "1234"),
                "3",
            ),
            (
                "Which tool measures temperature?",
                labelled(["a ruler", "a thermometer", "a scale"]),
                "B",
            ),
        ),
        "train": rows(
            "question choices answerKey",
            ("Which animal lays eggs?", labelled(["a hen", "a cow", "a dog", "a cat"]), "A"),
            ("What melts in the sun?", labelled(["glass", "snow", "brick", "sand"]), "B"),
        ),
    },
    ("allenai/ai2_arc", "ARC-Challenge"): {
        "test": rows(
            "question choices answerKey",
            (
                "A ball is thrown straight up. What is its speed at the top?",
                labelled(["rising", "zero", "constant", "unknown"]),
                "B",
            ),
            (
                "Which change is chemical?",
                labelled(["ice melting", "paper tearing", "iron rusting", "salt dissolving"]),
                "C",
            ),
        )
    },
    ("Rowan/hellaswag", None): {
        "validation": rows(
            "activity_label ctx_a ctx_b endings label",
            (
                *("Baking bread", "A woman kneads dough on a table.", "she"),
                [
                    "puts it in the oven.",
                    "drives a car away.",
                    "paints the table blue.",
                    "jumps over a fence.",
                ],
                "0",
            ),
            (
                "Home and Garden",
                "[header] How to water a fern [title] Choose a can. [step] A small can is best.",
                "",
                [
                    "Fill it with sand. [substeps] Wait a year.",
                    "Fill it with water [title] Pour slowly.",
                    "Throw it away.",
                    "Paint the fern.",
                ],
                "1",
            ),
            (
                *("Rowing", "Two men sit in a boat.", "the older Man"),
                ["sings a hymn to the fish.", "eats the oars.", "pulls the oars.", "melts."],
                "2",
            ),
        )
    },
    ("EleutherAI/logiqa", "logiqa"): {
        "test": rows(
            "label context question options",
            (
                *("b", "All bakers rise early. Nils is a baker.", "What follows?"),
                ["Nils is tall", "Nils rises early", "Nils sleeps late.", "Nothing follows"],
            ),
            (
                "d",
                "If it rains, the fair is moved. The fair was not moved.",
                "Which is true?",
                ["It rained", "The fair was cancelled", "It snowed", "It did not rain"],
            ),
        ),
        "validation": rows(
            "label context question options",
            (
                *("a", "No fish can sing. Otto sings.", "What is Otto?"),
                ["Not a fish", "A fish", "A bird", "A singer of songs about fish"],
            ),
        ),
    },
    ("cais/mmlu", "abstract_algebra"): {
        "test": rows(
            "question choices answer",
            ("What is 2 + 2 in the integers modulo 3?", ["0", "1", "2", "3"], 1),
            (
                "Is the group of two elements cyclic?",
                ["Yes", "No", "Only if infinite", "It has no elements"],
                0,
            ),
        ),
        "dev": rows(
            "question choices answer",
            ("What is the identity of addition?", ["0", "1", "2", "-1"], 0),
        ),
    },
    ("cais/mmlu", "management"): {
        "test": rows(
            "question choices answer",
            (
                "Who plans the work of a team?",
                ["The manager", "The visitor", "The rival", "Nobody"],
                0,
            ),
            (
                "A budget is, in short,",
                ["a plan for money", "a kind of desk", "a holiday", 'a "quote"'],
                0,
            ),
        ),
        "dev": rows(
            "question choices answer",
            ("What is a deadline?", ["A wall", "A date", "A phone", "A tax"], 1),
        ),
    },
    ("cais/mmlu", "philosophy"): {
        "test": rows(
            "question choices answer",
            ("What does logic study?", ["Plants", "Stars", "Inference", "Metals"], 2),
            ("A dilemma offers\nhow many ways out?", ["None", "One", "Two", "Ten"], 2),
        ),
        "dev": rows(
            "question choices answer",
            (
                "Who asks questions in a dialogue?",
                ["Someone", "No one", "A stone", "A number"],
                0,
            ),
        ),
    },
    ("baber/piqa", None): {
        "validation": rows(
            "goal sol1 sol2 label",
            (
                "To dry a wet book,",
                "stand it open in moving air.",
                "put it in a bucket of water.",
                0,
            ),
            ("dull knife", "sharpen it on a pillow ", "sharpen it on a stone ", 1),
            ("How do I keep soup warm?", "Put a lid on the pot.", "Put the pot in the snow.", 0),
        )
    },
    ("truthfulqa/truthful_qa", "multiple_choice"): {"validation": TRUTHS},
    ("ibm-research/acp_bench", "acp_app_bool"): {
        "test": rows(
            "context question answer",
            (
                FERRY,
                "Is the following action applicable in this state: load cart c0 at p0?",
                "yes",
            ),
            (
                FERRY,
                "Is the following action applicable in this state: load cart c1 at p1?",
                "no",
            ),
        )
    },
    ("ibm-research/acp_bench", "acp_app_mcq"): {
        "test": rows(
            "context choices question answer",
            (
                FERRY,
                labelled(
                    ["unload c0 at p0", "load c0 at p0", "load c1 at p1", "sail from p1 to p0"]
                ),
                "Which of the following actions is applicable? A. unload c0 at p0. B. load c0 at "
                "p0. C. load c1 at p1. D. sail from p1 to p0.",
                "B",
            ),
            (
                FERRY,
                labelled(
                    ["sail from p0 to p1", "unload c0 at p0", "load c1 at p1", "unload c1 at p1"]
                ),
                "Which of the following actions is applicable? A. sail from p0 to p1. B. unload "
                "c0 at p0. C. load c1 at p1. D. unload c1 at p1.",
                "A",
            ),
        )
    },
    ("ibm-research/acp_bench", "acp_val_bool"): {
        "test": rows(
            "context question answer",
            (FERRY, 'Is the plan "load c0 at p0, sail from p0 to p1" applicable?', "yes"),
            (FERRY, 'Is the plan "sail from p1 to p0" applicable?', "no"),
        )
    },
    ("SaylorTwift/bbh", "boolean_expressions"): {
        "test": rows(
            "input target", ("not True and True is", "False"), ("True or not True is", "True")
        )
    },
    ("SaylorTwift/bbh", "navigate"): {
        "test": rows(
            "input target",
            (
                f"{RETURN}Take 3 steps. Turn around. Take 3 steps.\nOptions:\n- Yes\n- No",
                "Yes",
            ),
            (f"{RETURN}Take 1 step. Take 1 step.\nOptions:\n- Yes\n- No", "No"),
        )
    },
    ("SaylorTwift/bbh", "word_sorting"): {
        "test": rows(
            "input target",
            (f"{SORT}pear apple fig", "apple fig pear"),
            (f"{SORT}oak elm", "elm oak"),
        )
    },
    ("harsh147/GroundCocoa", None): {
        "test": [
            flights("I want the cheapest seat in first class.", "C", "eefff"),
            flights("I fly economy, and only if it costs more than 130 dollars.", "E", "efefe"),
        ]
    },
    ("allenai/swag", "regular"): {
        "validation": rows(
            "startphrase ending0 ending1 ending2 ending3 label",
            (
                "The cook opens a jar. She",
                *("smells the jam.", "flies a plane.", "melts the jar.", "is a jar."),
                0,
            ),
            (
                "A boy runs to the door. He",
                *("eats it.", '"swims", he says.', "is asleep.", "opens it."),
                3,
            ),
            (
                "Two dogs see a ball. They",
                *("read it.", "chase it.", "sell it.", "paint it."),
                1,
            ),
        )
    },
    ("openai/gsm8k", "main"): {
        "test": rows(
            "question answer",
            (
                "Ida has 3 boxes with 4 pears each. She eats 2 pears. How many are left?",
                "Ida has 3*4=<<3*4=12>>12 pears.\nAfter eating 2 there are 12-2=<<12-2=10>>10.\n"
                "#### 10",
            ),
            (
                "A bus has 20 seats and 13 riders. How many seats are free?",
                "There are 20-13=<<20-13=7>>7 free seats.\n#### 7",
            ),
        ),
        "train": [
            {
                "question": f"Ben has {a} marbles and finds {b} more. How many has he now?",
                "answer": f"He has {a}+{b}=<<{a}+{b}={c}>>{c} marbles.\n#### {c}",
            }
            for a, b, c in (
                *((1, 2, 3), (3, 5, 8), (10, 4, 14)),
                *((7, 7, 14), (12, 9, 21), (20, 30, 50)),
            )
        ],
    },
    ("EleutherAI/asdiv", None): {
        "validation": rows(
            "body question answer",
            ("Five ducks swim on a pond. Two fly off.", "How many ducks are left?", "3 (ducks)"),
            (
                "A rope is 8 meters long. It is cut in 4 equal parts.",
                "How long is each part? ",
                "2 (meters)",
            ),
            ("Mo has 6 coins & Jo has 1.", "How many coins do they have?", "7 (coins)"),
        )
    },
    ("regisss/math_qa", None): {
        "test": rows(
            "Problem options correct",
            (
                "what is 10 percent of 50 ?",
                "a ) 1 , b ) 5 , c ) 10 , d ) 15 , e ) 50",
                "b",
            ),
            (
                "a train goes 60 km in 1 hour . how far does it go in 3 hours ?",
                "a ) 60 km , b ) 90 km , c ) 120 km , d ) 150 km , e ) 180 km",
                "e",
            ),
        )
    },
}


_LOAD = datasets.load_dataset


def load_rows(path: str, name: str | None = None, **options: Any) -> Any:
    """`datasets.load_dataset`, with our rows; where the sample has no split, any will do."""
    if path == "json":
        return _LOAD(path, name, **options)
    found = dict(HUB[path, name])
    some = next(iter(found.values()))
    for split in ("train", "validation"):
        found.setdefault(split, some)
    return datasets.DatasetDict({s: datasets.Dataset.from_list(r) for s, r in found.items()})
