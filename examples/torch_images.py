"""A PyTorch script with our loader: it reads the images of a batch at the same time, and goes on amid an epoch.

python examples/torch_images.py                      # on generated images
python examples/torch_images.py --data photos --size 128 --run runs/photos --epochs 30
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from braidax.torch import DataLoader  # was: from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, help="a folder with a folder of images for each class: folder/class/*.jpg")
parser.add_argument("--run", default="runs/torch", type=Path, help="the folder of the checkpoint")
for name, number in {"epochs": 3, "batch": 32, "size": 32, "every": 10}.items():
    parser.add_argument(f"--{name}", default=number, type=int)
args = parser.parse_args()

if args.data is None:
    args.data, rng, (x, y) = args.run / "images", np.random.default_rng(0), np.mgrid[-24:24, -24:24]
    places = {"diamonds": np.abs(x) + np.abs(y), "rings": np.hypot(x, y), "standing": y, "lying": x}
    for number in range(0 if args.data.exists() else 400):  # waves of four kinds, in any colors
        kind = list(places)[number % 4]
        (args.data / kind).mkdir(parents=True, exist_ok=True)
        waves = np.sin(rng.uniform(0.4, 0.8) * places[kind] + rng.uniform(0, 6))[:, :, None]
        pixels = np.where(waves > 0, *rng.uniform(0, 255, (2, 3))) + rng.normal(0, 20, (48, 48, 3))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(args.data / kind / f"{number}.png")
    print(f"no --data: {args.data} has generated images")


class Images(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = sorted(path for path in folder.glob("*/*") if path.suffix in (".jpg", ".jpeg", ".png", ".webp"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB").resize((args.size, args.size))
        pixels = torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1)
        return pixels / 128 - 1, self.classes.index(self.files[index].parent.name)


def normed(inputs, outputs, stride):
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


torch.manual_seed(0)
images = Images(args.data)
train, test = torch.utils.data.random_split(images, [0.9, 0.1])
print(f"{len(train)} images to train on, {len(test)} to test on, of {len(images.classes)} classes")
convolutions = [*normed(3, 16, 2), *normed(16, 32, 1), *normed(32, 64, 2)]
model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(images.classes)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
loader = DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True)
file, first, step = args.run / "checkpoint.pt", 0, 0
if file.exists():
    saved = torch.load(file)
    first, step = saved["epoch"], saved["step"]
    for part in "model", "optimizer", "loader":
        globals()[part].load_state_dict(saved[part])
    print(f"going on after step {step}")


def save(epoch):
    states = {
        name: part.state_dict() for name, part in [("model", model), ("optimizer", optimizer), ("loader", loader)]
    }
    torch.save({**states, "epoch": epoch, "step": step}, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)  # whole, or as it was


for epoch in range(first, args.epochs):
    for pixels, labels in loader:  # the rest of the epoch, where it goes on
        loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % args.every == 0:
            save(epoch)
            print(f"step {step}, epoch {epoch + 1}/{args.epochs}: loss {loss.item():.3f}", flush=True)
    save(epoch + 1)

model.eval()
with torch.no_grad():
    batches = [(model(pixels).argmax(1) == labels) for pixels, labels in DataLoader(test, batch_size=args.batch)]
print(f"step {step}: {100 * torch.cat(batches).float().mean():.0f} % of the test images are right")
