"""What a reply of Flower's says beside its content: who failed, who is gone, and by which name that is counted."""

from flwr.app import Message, RecordDict

from fedecho.core.server import one_line
from fedecho.core.types import CLIENT_FAILED

NODE_GONE, ANSWER_LOST, DEADLINE, NOT_PUSHED = "node gone", "answer lost", "deadline", "not pushed"
"""Codes of losses that are nobody's fault; a client's own failure is ``CLIENT_FAILED``."""

EXPIRED, UNAVAILABLE, NODE_UNAVAILABLE = 3, 4, 5
MEANINGS = {0: "failed", 1: "its app cannot be loaded", 2: "its app raised", 3: "the answer is lost (past its time to live)"}
MEANINGS |= {4: "the answer is unavailable", 5: "the node went away", 6: "refused by a mod", 7: "its app is not trusted"}
MEANINGS |= {8: "its app crashed"}
WITH_WORDS = (0, 1, 2, 6, 8)


def content_of(reply: Message) -> RecordDict:
    """A ValueError says why there is none."""
    if not reply.has_content():
        raise ValueError(error_text(reply))
    if not isinstance(reply.content, RecordDict):
        raise ValueError(f"the content is a {type(reply.content).__name__}, not records")
    return reply.content


def is_gone(reply: Message) -> bool:
    return bool(reply.has_error() and reply.error.code == NODE_UNAVAILABLE)


def is_from_node(reply: Message) -> bool:
    """Did the node itself speak, well or badly? The SuperLink makes the other replies, while the node may still be at work."""
    return not (reply.has_error() and reply.error.code in (EXPIRED, UNAVAILABLE, NODE_UNAVAILABLE))


def loss_code(reply: Message) -> str:
    return CLIENT_FAILED if is_from_node(reply) else NODE_GONE if is_gone(reply) else ANSWER_LOST


def error_text(reply: Message) -> str:
    error = reply.error
    said = " ".join(one_line(error.reason or "", 200).split())
    return f"{MEANINGS.get(error.code, f'error {error.code}')}{': ' + said if said and error.code in WITH_WORDS else ''}"
