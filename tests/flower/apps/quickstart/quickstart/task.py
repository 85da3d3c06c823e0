"""The network of Flower's PyTorch quickstart, images in the shape of CIFAR-10, and plain training."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, relu
from torch.utils.data import DataLoader, TensorDataset

SIZES = (60, 240, 900)
"""How many images the clients have, in turn: very unequal, so that it shows by what the server weighs them."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(relu(self.conv1(x)))
        x = self.pool(relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = relu(self.fc1(x))
        x = relu(self.fc2(x))
        return self.fc3(x)


def images(number: int, seed: int) -> TensorDataset:
    """Ten classes, each a coarse pattern of colours that is moved about and covered with noise."""
    patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1000 + seed)
    labels = torch.randint(10, (number,), generator=draw)
    clean = interpolate(patterns[labels], size=32, mode="bilinear")
    shifts = torch.randint(-4, 5, (number, 2), generator=draw).tolist()
    moved = torch.stack([image.roll((up, left), (1, 2)) for image, (up, left) in zip(clean, shifts, strict=True)])
    return TensorDataset(moved + 1.5 * torch.randn(moved.shape, generator=draw), labels)


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    if not 0 <= partition_id < num_partitions:
        raise ValueError(f"there is no partition {partition_id} of {num_partitions}")
    rows = images(SIZES[partition_id % len(SIZES)], partition_id)
    kept = len(rows) * 4 // 5
    train, test = torch.utils.data.random_split(rows, [kept, len(rows) - kept], torch.Generator().manual_seed(42))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def train(net: nn.Module, trainloader: DataLoader, epochs: int, lr: float, device: torch.device) -> float:
    net.to(device).train()
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    running_loss = 0.0
    for _ in range(epochs):
        for rows, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(rows.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net: nn.Module, testloader: DataLoader, device: torch.device) -> tuple[float, float]:
    net.to(device).eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for rows, labels in testloader:
            outputs = net(rows.to(device))
            loss += cross_entropy(outputs, labels.to(device)).item()
            correct += int((outputs.argmax(1) == labels.to(device)).sum())
    return loss / len(testloader), correct / len(testloader.dataset)
