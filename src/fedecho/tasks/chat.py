"""A question and its answer as a model wants to read them: through its chat template, or plainly where it has none."""

from dataclasses import dataclass
from typing import Any

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
            return f"Question: {content}\nAnswer:"
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

    def _template(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> Any:
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
