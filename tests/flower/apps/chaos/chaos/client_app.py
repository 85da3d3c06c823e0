"""FedEcho's client, whose second job goes wrong as its node's configuration says."""

import os
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedecho.flower.client_app import FROM_RUN_CONFIG, train_content
from fedecho.flower.wire import introduction, partition_of

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    return Message(introduction(partition_of(context.node_config)), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    fault = str(context.node_config.get("fault", "")) if second_job() else ""
    if fault == "exception":
        raise RuntimeError("the chaos client fails as it was told")
    answer = train_content(FROM_RUN_CONFIG, message.content, context)
    return Message(spoilt(answer, fault) if fault else answer, reply_to=message)


def second_job() -> bool:
    """Counted in a file: a client that raises leaves nothing in its context."""
    count = Path(os.environ["FLWR_HOME"]) / "jobs"
    jobs = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(jobs))
    return jobs == 2


def spoilt(answer: RecordDict, fault: str) -> RecordDict:
    arrays = dict(answer["arrays"])
    name = sorted(arrays)[0]
    values = arrays[name].numpy().copy()
    values[0] = np.nan
    arrays[name] = Array(values if fault == "nan" else np.zeros(3, np.float32))
    return RecordDict({**answer, "arrays": ArrayRecord(arrays)})
