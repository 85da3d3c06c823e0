"""The client of a FedEcho deployment: a Flower ``ClientApp`` that trains what it is sent.

No torch is imported here: the process that Flower starts for each message hands it to the node's persistent worker.
"""

import time

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedecho.flower.keys import CONTROL, check_addressee, introduction, partition_of
from fedecho.flower.link import work_in_worker
from fedecho.flower.run_config import Settings, in_simulation, pause_of

FROM_RUN_CONFIG = "fedecho.flower.run_config:experiment"


def make_client_app(experiment: str = FROM_RUN_CONFIG) -> ClientApp:
    """``experiment`` is ``module:function``, a function from the app's configuration to an ``Experiment``.

    It is named, not passed: only the worker imports it. ``worker = false`` in the app's configuration trains in Flower's own
    process instead, as Flower's simulation engine always does. ``pause-s`` in a node's configuration makes it slow, for trials.
    """
    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return Message(introduction(partition_of(context.node_config)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(train_content(experiment, message.content, context), reply_to=message)

    return app


def train_content(experiment: str, content: RecordDict, context: Context) -> RecordDict:
    """The answer to a dispatch; what the client must remember goes into its context."""
    check_addressee(content, context.node_config)
    settings = Settings.of(context.run_config)
    time.sleep(pause_of(context.node_config))
    memory = RecordDict({CONTROL: context.state.array_records[CONTROL]} if CONTROL in context.state.array_records else {})
    if settings.worker and not in_simulation():
        answer, memory = work_in_worker(experiment, context.run_config, content, memory)
    else:
        from fedecho.flower.job import work

        answer, memory = work(experiment, context.run_config, content, memory)
    if CONTROL in memory.array_records:
        context.state[CONTROL] = memory.array_records[CONTROL]
    return answer


app = make_client_app()
