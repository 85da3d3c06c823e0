"""ResNet-18 for CIFAR (He et al., 2016): 3 x 3 stem, no max-pool, BatchNorm; channels-last for speed."""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, relu


class Block(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of ``blocks`` blocks; the first has ``width`` channels, and each further stage twice as many."""

    def __init__(self, num_classes: int = 10, blocks: int = 2, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages, width_in = [], width
        for stage in range(4):
            for block in range(blocks):
                stages.append(Block(width_in, width * 2**stage, stride=2 if stage > 0 and block == 0 else 1))
                width_in = width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stages(relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.head(torch.flatten(adaptive_avg_pool2d(y, 1), 1))
        return logits


def resnet18(num_classes: int = 10, width: int = 64) -> nn.Module:
    """Return ResNet-18: 11,173,962 parameters with 10 classes and width 64."""
    network = ResNet(num_classes, blocks=2, width=width)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
