"""Train the small GPT-2 that ships in labcore/tiny: Jane Austen's six novels, two cores, no GPU.

    apt-get download r-cran-janeaustenr
    dpkg-deb -x r-cran-janeaustenr_*.deb austen
    .venv/bin/python -m pip install rdata==1.1.0  # reads R's data files; nothing else here needs it
    .venv/bin/python training/train_tiny.py austen labcore/tiny

The model is transformers' own GPT-2, so that the one in labcore.gpt2 has an independent teacher.
The same arguments and seed give the same bytes on the same machine; other processors round in other
ways, so the weights are committed. labcore/tiny/README.md holds what one run printed.
"""

import argparse
import json
import math
import re
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import trange
from transformers import GPT2Config, GPT2LMHeadModel

NOVELS = [
    "sensesensibility", "prideprejudice", "mansfieldpark", "emma", "northangerabbey", "persuasion",
]  # fmt: skip
TO_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "\N{NO-BREAK SPACE}": " ", "_": None}
)
END_OF_TEXT = "<|endoftext|>"  # after every paragraph: the model learns where to stop
VOCAB_SIZE, POSITIONS = 2048, 1024
TOKENS_A_STEP, SHORT, LONG = 4096, 256, 1024
LONG_FROM, LONG_EVERY = 0.3, 4  # after 30% of the steps every fourth one reads the whole context
PEAK_RATE, LAST_RATE, WARM_UP = 3e-3, 6e-5, 150


def read_novels(package: Path) -> list[list[str]]:
    """The paragraphs of each novel, in ASCII where the text allows it.

    R keeps a package's data in a file of compressed objects (.rdb) behind an index (.rdx).
    """
    import rdata

    base = package / "usr/lib/R/site-library/janeaustenr/data/Rdata"

    def unpack(data: bytes):
        return rdata.conversion.convert(rdata.parser.parse_data(data, extension=".rds"))

    places = unpack(base.with_suffix(".rdx").read_bytes())["variables"]
    objects = base.with_suffix(".rdb").read_bytes()
    novels = []
    for name in NOVELS:
        start, length = places[name]
        packed = objects[start + 4 : start + length]  # behind 4 bytes: the length when unpacked
        lines = unpack(zlib.decompress(packed))
        paragraphs = re.split(r"\n\s*\n", "\n".join(lines).translate(TO_ASCII))
        novels.append([" ".join(p.split()) for p in paragraphs if p.strip()])
    return novels


def split(novel: list[str], held_out: float = 0.05) -> tuple[list[str], list[str]]:
    """The last 5% of a novel, in whole paragraphs, is never trained on."""
    room, kept = (1 - held_out) * sum(map(len, novel)), 0
    while room > 0:
        room -= len(novel[kept])
        kept += 1
    return novel[:kept], novel[kept:]


def train_tokenizer(paragraphs: list[str]) -> Tokenizer:
    """GPT-2's own kind: byte pairs over bytes, so that no text is out of vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, paragraphs: list[str]) -> torch.Tensor:
    """One stream of token ids, an end-of-text after each paragraph."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return torch.tensor([i for p in paragraphs for i in [*tokenizer.encode(p).ids, end]])


def draw_batch(stream, context: int, generator) -> tuple[torch.Tensor, ...]:
    """Inputs, targets and positions, each [batch, context]: windows at random offsets.

    A short window sits anywhere in the 1,024 positions: all are trained, at a part of the cost.
    """
    batch = TOKENS_A_STEP // context
    start = torch.randint(len(stream) - context - 1, (batch, 1), generator=generator)
    offset = torch.randint(POSITIONS - context + 1, (batch, 1), generator=generator)
    steps = torch.arange(context)
    return stream[start + steps], stream[start + steps + 1], offset + steps


@torch.no_grad()
def judge(model, stream, windows: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats a token, and by how much the best logit leads the second: both [windows, 1024].

    The windows are spread evenly over the stream.
    """
    starts = torch.linspace(0, len(stream) - LONG - 2, windows).long()[:, None]
    steps = torch.arange(LONG)
    nats, leads = [], []
    for start in starts.split(8):
        logits = model(stream[start + steps]).logits
        target = stream[start + steps + 1]
        nats.append(F.cross_entropy(logits.transpose(1, 2), target, reduction="none"))
        leads.append(-logits.topk(2).values.diff().squeeze(-1))
    return torch.cat(nats), torch.cat(leads)


def optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings, norms and biases."""
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate(step: int, steps: int) -> float:
    """A short climb, then half a cosine down."""
    done = max(0, step - WARM_UP) / max(1, steps - WARM_UP)
    falling = LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
    return falling * min(1, (step + 1) / WARM_UP)


def train(model, stream, steps: int, seed: int) -> None:
    """Change `model` in place; 0.5 to 1 s a step on two cores."""
    generator = torch.Generator().manual_seed(seed)
    optims = optimizers(model)
    model.train()
    progress = trange(steps, unit="step")
    for step in progress:
        for group in (group for optim in optims for group in optim.param_groups):
            group["lr"] = rate(step, steps)
        long = step >= LONG_FROM * steps and step % LONG_EVERY == LONG_EVERY - 1
        inputs, targets, positions = draw_batch(stream, LONG if long else SHORT, generator)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")


def report(folder: Path, held: torch.Tensor, bytes_a_token: float) -> dict:
    """What the files are worth, read again as a reader of the book reads them."""
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    nats, leads = judge(model, held)
    eighths = nats.view(-1, 8, POSITIONS // 8).mean((0, 2))
    return {
        "parameters": model.num_parameters(),
        "held-out tokens": len(held),
        "bytes a token": bytes_a_token,
        "nats a byte": nats.mean().item() / bytes_a_token,
        "bits a byte": nats.mean().item() / bytes_a_token / math.log(2),
        "nats a token, by eighth of the context": [round(x, 3) for x in eighths.tolist()],
        "median lead of the best logit": leads.median().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", type=Path, help="the unpacked Debian package")
    parser.add_argument("out", type=Path, help="where config, tokenizer and weights go")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    parts = [split(novel) for novel in read_novels(args.package)]
    train_part = [paragraph for first, _ in parts for paragraph in first]
    held_part = [paragraph for _, last in parts for paragraph in last]
    tokenizer = train_tokenizer(train_part)
    stream, held = encode(tokenizer, train_part), encode(tokenizer, held_part)

    end = tokenizer.token_to_id(END_OF_TEXT)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=POSITIONS, n_embd=192, n_layer=5, n_head=3,
        activation_function="gelu_pytorch_tanh",  # GPT-2's "gelu_new" in one operation
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    train(model, stream, args.steps, args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    config.activation_function = "gelu_new"
    model.half().save_pretrained(args.out)  # safetensors
    (args.out / "generation_config.json").unlink()  # says nothing that config.json does not

    tokens = {"tokens trained on": len(stream), "epochs": args.steps * TOKENS_A_STEP / len(stream)}
    bytes_a_token = sum(len(p.encode()) + 1 for p in held_part) / len(held)  # + 1: the line's end
    print(json.dumps(tokens | report(args.out, held, bytes_a_token), indent=2))


if __name__ == "__main__":
    main()
