"""Answers that the checks of chapter 8a must refuse."""

from bookkit.exercises.ch08a import check_growth, check_prompt_fits, check_puzzle
from labcore.blocks import blocks_needed
from labcore.steps import StepLoop


class OneBlock(StepLoop):
    """Hides one block from growth, whatever the watermark."""

    def make_room(self, sequence):
        self.free -= 1
        super().make_room(sequence)
        self.free += 1


class NotGivenBack(StepLoop):
    """Hides the headroom for ever."""

    def make_room(self, sequence):
        self.free -= self.jobs.limits.headroom
        super().make_room(sequence)


class Nothing(StepLoop):
    """Lets everybody grow, out of nothing."""

    def make_room(self, sequence):
        self.blocks[sequence.index] = self.jobs.blocks(sequence.index, sequence.stored + 1)


class WhoeverAsks(StepLoop):
    """Throws out the one that grows, and not the newest."""

    def make_room(self, sequence):
        i = sequence.index
        needed = self.jobs.blocks(i, sequence.stored + 1) - self.blocks[i]
        if needed > self.free - self.jobs.limits.headroom:
            self.preempt(sequence)
        else:
            self.free -= needed
            self.blocks[i] += needed


class FirstBlock(StepLoop):
    """Lets a sequence in when `wanted` blocks fit, and some headroom stays."""

    headroom = 1

    def wanted(self, head):
        return 1

    def admit(self):
        while self.waiting:
            head, limits = self.waiting[0], self.jobs.limits
            needed = self.wanted(head)
            if self.free - needed < self.headroom * limits.headroom * bool(self.running):
                break
            self.running.append(self.waiting.popleft())
            self.free -= needed
            self.blocks[head.index] = needed
            self.fill(head)
            head.started = head.stored


class NoHeadroom(FirstBlock):
    """Asks for the prompt, and not for headroom."""

    headroom = 0

    def wanted(self, head):
        return blocks_needed(head.prompt, self.jobs.limits.block_size)


class OneMore(FirstBlock):
    """Asks for the prompt and one token."""

    def wanted(self, head):
        return blocks_needed(head.prompt + 1, self.jobs.limits.block_size)


class OneAStep(FirstBlock):
    """Lets one in a step, and expects that somebody always waits."""

    def admit(self):
        head = self.waiting.popleft()
        self.running.append(head)
        self.blocks[head.index] = self.wanted(head)
        self.fill(head)


WRONG = {
    check_puzzle: [
        [5, 5, 4, 20, 1],
        [4, 4, 4, 20, 1],
        [4, 5, 5, 20, 1],
        [4, 5, 4, 24, 1],
        [4, 5, 4, 20, 5],
        [4],
    ],
    check_growth: [StepLoop, OneBlock, NotGivenBack, Nothing, WhoeverAsks],
    check_prompt_fits: [StepLoop, FirstBlock, NoHeadroom, OneMore, OneAStep],
}
