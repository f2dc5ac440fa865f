"""Where the tokens of an adapter's own find room in a model's vocabulary."""

import torch

from megatron_dcpo.weights.peft_adapter import Room


class Tokenizer:
    def __init__(self, names):
        self.names = names

    def get_vocab(self):
        return {name: number for number, name in enumerate(self.names)}


def test_room_is_behind_the_tokenizers_last_id():
    output = torch.arange(20.0)[:, None].repeat(1, 4)
    room = Room.of(Tokenizer([f"t{i}" for i in range(12)]), output, 5)
    assert room.ids == (12, 13, 14, 15, 16)
    assert room.rows[:, 0].tolist() == [12, 13, 14, 15, 16]


def test_room_is_on_reserved_tokens_where_no_row_is_free():
    names = [*(f"t{i}" for i in range(4)), *(f"<|reserved_special_token_{i}|>" for i in range(6)), "end"]
    assert Room.of(Tokenizer(names), torch.zeros(11, 4), 5).ids == (5, 6, 7, 8, 9)
    assert Room.of(Tokenizer(names), torch.zeros(11, 4), 7) is None


def test_the_pair_changes_its_rows_alone():
    torch.manual_seed(0)
    output, own = torch.randn(20, 4), torch.randn(5, 4)
    room = Room.of(Tokenizer([f"t{i}" for i in range(12)]), output, 5)
    A, B = room.pair(own, scale=2.0).values()
    expected = output.clone()
    expected[12:17] = own
    torch.testing.assert_close(output + 2.0 * B @ A, expected)
