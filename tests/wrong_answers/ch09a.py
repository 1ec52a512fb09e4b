"""Answers that the checks of chapter 9a must refuse."""

from bookkit.exercises.ch09a import check_lengths, check_right_sizes, check_samples

LENGTHS = {0: [5, 11, 16, 16], 1: [5, 16, 16, 11], 2: [16, 16, 16, 15]}


def counted(prompt, answer, n, b, shared, copies):
    needed = -(-(prompt + answer) // b)
    return shared + n * (needed - shared), n * needed, copies


def rounded_up(prompt, answer, n, b):
    return counted(prompt, answer, n, b, -(-prompt // b), (n - 1) * (prompt % b > 0))


def everyone_copies(prompt, answer, n, b):
    return counted(prompt, answer, n, b, prompt // b, n * (prompt % b > 0))


def copies_full_blocks(prompt, answer, n, b):
    return counted(prompt, answer, n, b, prompt // b, n - 1)


def next_token(prompt, answer, n, b):
    return counted(prompt, answer + 1, n, b, prompt // b, (n - 1) * (prompt % b > 0))


WRONG = {
    check_samples: [
        rounded_up,
        everyone_copies,
        copies_full_blocks,
        next_token,
        lambda *_: (144, 624, 0),
    ],
    check_lengths: [
        lambda _: [16] * 4,  # no end of text
        lambda _: [5, 11, 16, 16],  # always as at 0
        lambda p: sorted(LENGTHS[p]),
        lambda p: LENGTHS[p][::-1],
        lambda p: [n + (n < 16) for n in LENGTHS[p]],  # with the end of text
    ],
    check_right_sizes: [[], [1, 4, 16], [16], [4, 16], [1, 2], 1, {1: True, 4: False, 16: False}],
}
