"""A site of NVFlare's simulator: the script that its client API runs."""

import nvflare.client as flare

from benchmarks.peers.job import examples, inherited, network, settle, train_locally


def main() -> None:
    job = inherited()
    settle(job)
    flare.init()
    data = examples(job, int(flare.get_site_name().rpartition("-")[2]) - 1)
    module = network(job.network)
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        module.load_state_dict(received.params)
        train_locally(job, module, data)
        flare.send(flare.FLModel(params=module.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": job.num_local_steps}))


if __name__ == "__main__":
    main()
