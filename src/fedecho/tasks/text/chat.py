"""Format a question and its answer with a model's chat template, or as plain text if it has none."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from textwrap import shorten
from typing import Any, Literal

from fedecho.tasks.text.readers import LineError, WorkedExample

DAY = datetime(2024, 7, 26)
"""The date given to templates that print today's date, so that runs are reproducible. It is Llama's own fallback."""
STRFTIME_CODES = [f"%{part}" for part in ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAwdbBmyYHIpMSfjUWxXcGuV")]
"""Format codes of ``strftime``, longer ones first."""
Part = Literal["query", "answer"]
"""What is predicted of a text."""
PROMPT = "{question}\nReason step by step. End with a line that holds #### and the final number."


@dataclass(frozen=True)
class Chat:
    """Formats questions and answers for a tokenizer. ``prompt`` contains ``{question}`` and is used for training and evaluation."""

    tokenizer: Any
    prompt: str = PROMPT

    def question(self, question: str) -> str:
        """Return the text up to the start of the answer."""
        content = self.prompt.replace("{question}", question)
        if not self.tokenizer.chat_template:
            return f"{self._start}Question: {content}\nAnswer:"
        return str(self._template([{"role": "user", "content": content}], add_generation_prompt=True))

    def question_and_answer(self, question: str, answer: str) -> tuple[str, str]:
        """Return the text up to the answer, and the answer with the end of the turn."""
        before = self.question(question)
        if self.tokenizer.chat_template:
            content = self.prompt.replace("{question}", question)
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            whole = str(self._template(turns, add_generation_prompt=False))
            if whole.startswith(before):
                return before, whole[len(before) :].rstrip("\n")
        space = "" if self.tokenizer.chat_template else " "
        return before, f"{space}{answer}{self.tokenizer.eos_token or ''}"

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Tokenize all texts in one call, which is much faster. Templates already contain the special tokens."""
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def rows(
        self, texts: Sequence[WorkedExample], part: Part, max_tokens: int, *, cut: bool
    ) -> tuple[list[list[int]], list[int], list[int]]:
        """Tokenize texts; return their tokens and, for each, the first predicted position and the end of them.

        Position p predicts token p + 1: an answer from token s to e is predicted at s - 1 to e - 1, a query at all positions.
        ``cut`` shortens texts to ``max_tokens``.
        """
        pieces = [self.question_and_answer(text.question, text.answer) for text in texts]
        questions, answers = (self.tokens([piece[index] for piece in pieces]) for index in (0, 1))
        rows, first, end = [], [], []
        for text, question, answer in zip(texts, questions, answers, strict=True):
            row = (question if part == "query" else question + answer)[: max_tokens if cut else None]
            if part == "answer" and len(row) <= len(question):
                problem = f"its question of {len(question)} tokens leaves none of the {max_tokens} for the answer"
                raise LineError(text.path, text.line, f"{problem}: shorten or remove it")
            rows.append(row)
            first.append(0 if part == "query" else len(question) - 1)
            end.append(len(row) if part == "query" else len(row) - 1)
        return rows, first, end

    @property
    def _start(self) -> str:
        """Return the start token if the tokenizer adds one by default; ``tokens`` does not."""
        bos = self.tokenizer.bos_token
        adds_bos = bos is not None and self.tokenizer("a")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return str(bos) if adds_bos else ""

    def _template(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> Any:
        try:
            template = with_fixed_date(self.tokenizer.get_chat_template())
            return self.tokenizer.apply_chat_template(
                turns, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program and can raise anything
            reason = shorten(str(error) or type(error).__name__, 160, placeholder=" ...")
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path} rejects a user turn followed by an assistant turn ({reason}): "
                "fix the template, or remove it from the tokenizer's files to use plain text"
            ) from None


def with_fixed_date(template: str) -> str:
    """Replace the clock function that transformers offers to a template by a macro with a fixed date.

    The macro's line ends where the template begins, so Jinja trims the same line ends as it would without the macro.
    """
    if "strftime_now" not in template:
        return template
    parts = "".join(f" | replace('{part}', '{DAY.strftime(part)}')" for part in STRFTIME_CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}\n{template}"
