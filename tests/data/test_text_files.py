"""Readers of sentence pairs and worked questions, and their errors for broken files."""

import json
from pathlib import Path

import pytest
from tiny_text import pairs, questions, write_gsm8k, write_mrpc

from fedecho.tasks.data_files import MissingDataError, find_model
from fedecho.tasks.text.readers import read_instructions, read_pairs


def test_glue_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    write_mrpc(tmp_path, num_train=12)
    found = read_pairs(tmp_path / "train.tsv", labelled=True)
    assert [(pair.label, pair.first, pair.second) for pair in found] == pairs(12, 0)
    assert [pair.line for pair in found] == list(range(2, 14))
    unlabeled = read_pairs(tmp_path / "test.tsv", labelled=False)
    assert [pair.label for pair in unlabeled] == [None] * 16


def test_a_users_own_tsv_and_jsonl_are_the_same_pairs(tmp_path: Path) -> None:
    rows = pairs(5, 1)
    (tmp_path / "mine.tsv").write_text("label\tsentence1\tsentence2\n" + "".join(f"{a}\t{b}\t{c}\r\n" for a, b, c in rows))
    objects = [{"sentence1": b, "sentence2": c, "label": a} for a, b, c in rows]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, objects)))
    for name in ("mine.tsv", "mine.jsonl"):
        found = read_pairs(tmp_path / name, labelled=True)
        assert [(pair.label, pair.first, pair.second) for pair in found] == rows


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.tsv", "label\tsentence1\tsentence2\n1\tx\ty\n0\tonly one\n", r"a\.tsv, line 3: has 2 columns .* header has 3"),
        ("a.tsv", "label\tsentence1\tsentence2\nyes\tx\ty\n", r"a\.tsv, line 2: the label must be a class.*'yes'"),
        ("a.tsv", "label\tsentence1\tsentence2\n1\tx\t \n", r"a\.tsv, line 2: 'sentence2' must be a non-empty string"),
        ("a.tsv", "label\tfirst\tsecond\n1\tx\ty\n", r"a\.tsv, line 1: the header has no sentence1"),
        ("a.tsv", "label\tsentence1\tsentence2\n", r"a\.tsv contains no pairs"),
        ("a.jsonl", '{"sentence1": "x", "sentence2": "y", "label": 1}\n{"sentence1": \n', r"a\.jsonl, line 2: invalid JSON"),
        ("a.jsonl", '{"sentence1": "x"}\n', r"a\.jsonl, line 1: has no 'sentence2'"),
        ("a.jsonl", "[1]\n", r"a\.jsonl, line 1: must be a JSON object"),
        ("a.jsonl", '{"sentence1": "x", "sentence2": "y", "label": true}\n', r"line 1: the label must be"),
        ("a.txt", "x", r"a\.txt must be a \.tsv or a \.jsonl file"),
        ("a.tsv", "label\tsentence1\tsentence1\n1\tx\ty\n", r"a\.tsv, line 1: the header names 'sentence1' twice"),
        (
            "a.tsv",
            f"label\tsentence1\tsentence2\n{'9' * 5000}\tx\ty\n",
            r"line 2: the label must be a class number from 0, got",
        ),
        (
            "a.jsonl",
            '{"sentence1": "x\\ud83d", "sentence2": "y", "label": 1}\n',
            r"line 1: 'sentence1' contains half of a surrogate pair",
        ),
        ("a.jsonl", '{"sentence1": ' + "[" * 100_000, r"a\.jsonl, line 1: unsupported JSON \(nested too deeply\)"),
        ("a.jsonl", '{"label": ' + "9" * 5000 + "}", r"a\.jsonl, line 1: unsupported JSON \(Exceeds the limit"),
    ],
)
def test_a_broken_pair_is_named_by_file_and_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_pairs(tmp_path / name, labelled=True)


def test_a_heading_may_mix_the_names_of_glue_and_of_users(tmp_path: Path) -> None:
    (tmp_path / "mixed.tsv").write_text("Quality\tsentence1\t#2 String\n1\tx\ty\n")
    (pair,) = read_pairs(tmp_path / "mixed.tsv", labelled=True)
    assert (pair.first, pair.second, pair.label) == ("x", "y", 1)


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        read_pairs(tmp_path / "absent.tsv", labelled=True)
    (tmp_path / "binary.tsv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.tsv, line 1: not UTF-8"):
        read_pairs(tmp_path / "binary.tsv", labelled=True)
    with pytest.raises(ValueError, match="cannot read"):
        read_instructions(_folder(tmp_path / "folder.json"))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_gsm8k_and_mathinstruct(tmp_path: Path) -> None:
    write_gsm8k(tmp_path, num_train=8)
    found = read_instructions(tmp_path / "train.jsonl")
    assert [each.question for each in found] == [row["question"] for row in questions(8, 0)]
    assert all("<<" not in each.answer and "####" in each.answer for each in found), "the calculator's notes are left out"
    for each in found:
        assert each.group == f"{each.answer.count(' + ')} steps"
    rows = [{"source": f"data/CoT/{n % 2}.json", "instruction": f"q{n}", "output": f"a{n}"} for n in range(3)]
    (tmp_path / "MathInstruct.json").write_text(json.dumps(rows))
    again = read_instructions(tmp_path / "MathInstruct.json")
    assert [(each.question, each.answer, each.group) for each in again] == [
        (row["instruction"], row["output"], row["source"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '[{"instruction": "q"},\n{"instruction": 1, "output": "a"}]', r"line 1: must have question and answer or"),
        ("a.json", '[{"instruction": "q", "output": "a"},\n', r"a\.json, line 2: invalid JSON"),
        ("a.json", "{}", r"a\.json must be a JSON list of objects, got a dict"),
        ("a.json", "[]", r"a\.json contains no questions"),
        ("a.jsonl", '{"question": "q", "answer": ""}\n', r"a\.jsonl, line 1: 'answer' must be a non-empty string"),
        ("a.csv", "x", r"must be a \.json or a \.jsonl file"),
        (
            "a.jsonl",
            '{"question": "q", "answer": "<<1+1=2>>"}\n',
            r"line 1: 'answer without <<\.\.\.>>' must be a non-empty string",
        ),
        ("a.jsonl", '{"instruction": "q", "input": 3, "output": "a"}\n', r"line 1: 'input' must be a non-empty string"),
    ],
)
def test_a_broken_question_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        read_instructions(tmp_path / name)


def test_what_an_instruction_is_about_belongs_to_the_question(tmp_path: Path) -> None:
    rows = [{"instruction": "Add them.", "input": given, "output": "3"} for given in ("1 and 2", "", None)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    assert [each.question for each in read_instructions(tmp_path / "alpaca.json")] == [
        "Add them.\n\n1 and 2",
        "Add them.",
        "Add them.",
    ]


def test_a_calculator_s_notes_are_left_out_and_program_code_is_not(tmp_path: Path) -> None:
    kept = [
        "print((1 << n) >> 2)",
        "std::vector<<int>> v",
        "x <<= 2; y >>= 1",
        "<<a=b>>",
        "if (1<<x == 8>>1)",
        "m = 1<<n; y=2>>1",
    ]
    notes = ["<<48/2=24>>", "<<2*3.5=7>>", "<<1000*.5=$500>>", "<<10-12=-2>>", "<<1,000+1=1,001>>", "<<4/10*100=40%>>"]
    rows = [{"question": "q", "answer": f"so {text}!"} for text in kept + notes]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    answers = [each.answer for each in read_instructions(tmp_path / "mine.jsonl")]
    assert answers == [f"so {text}!" for text in kept] + ["so !"] * len(notes)


def test_a_model_is_a_folder_here_or_in_the_data_folder_or_a_name_with_an_owner(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert find_model(str(tmp_path / "tiny")) == str(tmp_path / "tiny")
    assert find_model("tiny", tmp_path) == str(tmp_path / "tiny")
    assert find_model("someone/tiny", tmp_path) == str(tmp_path / "tiny"), "a saved copy comes before the hub"
    assert find_model("someone/other", tmp_path) == "someone/other"
    for name in ("other", "/nowhere/other", "./some/other", "/nowhere/tiny", "./some/tiny", "~/nowhere/tiny", "a/b/tiny"):
        with pytest.raises(MissingDataError, match=rf"there is no model folder {name}"):
            find_model(name, tmp_path)
