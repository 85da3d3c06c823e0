"""One message after another to one node, with the worker and without it in turns; the seconds of each go to a file."""

import json
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedecho.core.types import Dispatch, GlobalModel
from fedecho.flower.codec import Codec
from fedecho.runs.build import bound_network
from roundtrip.task import experiment

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    network = bound_network(experiment({}).task, 0)
    codec = {worker: Codec(network.layout, config={"worker": worker}) for worker in (True, False)}
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(2 * int(context.run_config["repeats"]) + 2):
        worker = number % 2 == 0
        order = Dispatch(number, 0, GlobalModel(0, network.weights), seed=number)
        began = time.monotonic()
        (sent,) = grid.push_messages([Message(codec[worker].dispatch(order), nodes[0], "train", ttl=600)])
        while not (replies := list(grid.pull_messages([sent]))):
            time.sleep(0.05)
        took = time.monotonic() - began
        codec[worker].read_answer(replies[0].content, order)
        if number >= 2:  # the first of each kind starts the worker and warms the disk
            seconds["with" if worker else "without"].append(took)
    Path(str(context.run_config["out"])).write_text(json.dumps(seconds))
