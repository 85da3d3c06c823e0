"""Names, summaries and defaults that the command line shows without importing torch; a test compares them with the real ones."""

RECIPES = {
    "digits": "UCI digits, 20 clients with few classes each, one in ten of them 50 times slower. Takes seconds on a laptop.",
    "stragglers": "UCI digits; only the two slowest of 20 clients hold examples of the digits 8 and 9.",
    "cifar10": "The paper's table 1: CIFAR-10, ResNet-18, 50 clients, 500 versions, U = 2,000 CIFAR-100 images. Needs a GPU.",
    "cifar100": "The paper's table 2: CIFAR-100, ResNet-18, 50 clients, 1,000 versions, U = 2,000 CIFAR-10 images. Needs a GPU.",
    "mrpc": "The paper's MRPC table: BERT-base, 10 clients, 200 versions, 100 unlabeled pairs. Needs a GPU and fedecho[text].",
    "mathinstruct": "The paper's GSM8K table: Qwen2.5-1.5B-Instruct, 10 clients, 5 versions. Needs a GPU and fedecho[text].",
}
ALGORITHMS = {
    "fedavg": "Synchronous averaging: waits for all clients of a round and adds the mean of their updates.",
    "fedasync": "Mixes every update into the model on arrival, down-weighting stale ones.",
    "fedbuff": "Adds the mean of a buffer of updates, optionally down-weighting stale ones.",
    "ca2fl": "FedBuff, calibrated with each client's cached latest update.",
    "fedac": "Weights updates by their agreement with the model's recent direction; server momentum and client control variates.",
    "fadas": "AMSGrad on the mean of a buffer of updates.",
    "fedecho": "Any other method, followed at each version by distillation from all clients' latest logits.",
    "fedecho+": "FedEcho with each client's label prior divided out of its logits.",
}
TASKS = {
    "digits": "Classify UCI digits; some training images are held out as the unlabeled set.",
    "cifar": "Classify CIFAR-10 or CIFAR-100 images; the unlabeled set comes from another image set.",
    "mrpc": "Detect paraphrases (GLUE MRPC); the unlabeled set is test pairs.",
    "mathinstruct": "Fine-tune a language model on MathInstruct, evaluated on GSM8K; some questions are the unlabeled set.",
}
PROFILES = ("large", "mild", "equal")
EXECUTORS = ("serial", "pool", "cuda", "ray")
CHECKPOINT_S = 30.0
