"""The job as Flower's apps: a module of its own, because Ray's workers import it."""

from functools import cache

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from benchmarks.peers.job import Job, examples, inherited, network, settle, train_locally
from benchmarks.peers.tally import say

client_app, server_app = ClientApp(), ServerApp()


@cache
def kept() -> tuple[Job, nn.Module]:
    """A worker keeps its module from message to message."""
    job = inherited()
    settle(job)
    return job, network(job.network)


@cache
def data_of(client: int) -> tuple[Tensor, Tensor]:
    return examples(inherited(), client)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    job, module = kept()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_locally(job, module, data_of(int(context.node_config["partition-id"])))
    metrics = MetricRecord({"num-examples": job.num_examples})
    return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    job = inherited()
    share = job.concurrency / job.num_clients
    strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=job.num_clients)
    strategy.start(grid, ArrayRecord(network(job.network).state_dict()), num_rounds=job.num_updates // job.concurrency)
    say("flower", "flwr", "ray", updates=job.num_updates, note="synchronous rounds (no buffered asynchronous strategy)")
