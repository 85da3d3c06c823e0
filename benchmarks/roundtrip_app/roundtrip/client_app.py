"""A client that trains in its worker or in Flower's own process, as each message asks."""

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedecho.flower.client_app import work_in_worker

EXPERIMENT = "roundtrip.task:experiment"
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    if message.content["config"]["worker"]:
        answer, _ = work_in_worker(EXPERIMENT, context.run_config, message.content, RecordDict())
    else:
        from fedecho.flower.worker import work

        answer, _ = work(EXPERIMENT, context.run_config, message.content, RecordDict())
    return Message(answer, reply_to=message)
