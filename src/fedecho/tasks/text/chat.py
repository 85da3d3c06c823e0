"""A question and its answer as a model wants to read them: through its chat template, or plainly where it has none."""

from dataclasses import dataclass
from datetime import datetime
from textwrap import shorten
from typing import Any

DAY = datetime(2024, 7, 26)
"""What templates that write today's date are told: a run must not change overnight. Llama's own fall back on this one."""
PARTS = [f"%{part}" for part in ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAwdbBmyYHIpMSfjUWxXcGuV")]
"""Of a format, the longer ones first."""
PROMPT = "{question}\nReason step by step. End with a line that holds #### and the final number."


@dataclass(frozen=True)
class Chat:
    """``prompt`` holds ``{question}``; training and evaluation use the same one."""

    tokenizer: Any
    prompt: str = PROMPT

    def asked(self, question: str) -> str:
        """The text up to where the answer begins."""
        content = self.prompt.replace("{question}", question)
        if not self.tokenizer.chat_template:
            return f"{self._start}Question: {content}\nAnswer:"
        return str(self._template([{"role": "user", "content": content}], add_generation_prompt=True))

    def answered(self, question: str, answer: str) -> tuple[str, str]:
        """The text up to the answer, and from there on with the end of the turn."""
        asked = self.asked(question)
        if self.tokenizer.chat_template:
            content = self.prompt.replace("{question}", question)
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            whole = str(self._template(turns, add_generation_prompt=False))
            if whole.startswith(asked):
                return asked, whole[len(asked) :].rstrip("\n")
        space = "" if self.tokenizer.chat_template else " "
        return asked, f"{space}{answer}{self.tokenizer.eos_token or ''}"

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """All at once, which is many times faster. Templates write the special tokens themselves."""
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @property
    def _start(self) -> str:
        """What a base model's tokenizer puts before every text, which ``tokens`` does not."""
        bos = self.tokenizer.bos_token
        adds = bos is not None and self.tokenizer("a")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return str(bos) if adds else ""

    def _template(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> Any:
        try:
            template = on_the_same_day(self.tokenizer.get_chat_template())
            return self.tokenizer.apply_chat_template(
                turns, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program, and may raise errors of its own
            reason = shorten(str(error) or type(error).__name__, 160, placeholder=" ...")
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path} does not take a user's turn and an assistant's ({reason}): "
                "mend it, or remove it from the tokenizer's files, and questions are asked plainly"
            ) from None


def on_the_same_day(template: str) -> str:
    """The template, with a macro in the place of the clock that transformers offers it.

    The macro's line ends where the template begins, so that what Jinja trims of lines is what it would trim without it.
    """
    if "strftime_now" not in template:
        return template
    parts = "".join(f" | replace('{part}', '{DAY.strftime(part)}')" for part in PARTS)
    return f"{{% macro strftime_now(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}\n{template}"
