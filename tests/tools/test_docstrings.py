"""``tools/docstrings.py``: a planted fault for each rule, and the package itself."""

from textwrap import dedent

import pytest

from tools import docstrings


def complaints(text: str, **others: str) -> list[str]:
    """The complaints about ``shop/till.py``, without its path, among other modules of ``shop``."""
    sources = {f"shop/{name}.py": dedent(other) for name, other in others.items()}
    found = docstrings.complaints({**sources, "shop/till.py": dedent(text)})
    assert all(line.startswith("shop/till.py:") for line in found)
    return [line.removeprefix("shop/till.py:") for line in found]


def test_the_package_has_no_complaints(capsys: pytest.CaptureFixture[str]) -> None:
    assert docstrings.main() == 0, capsys.readouterr().out


def test_public_names_need_docstrings_where_they_are_defined() -> None:
    text = '''
        from shop.goods import sell

        class Till:
            class Drawer:
                """A drawer."""

                @property
                def coins(self): return 3

                @coins.setter
                def coins(self, number): ...

            def _count(self): ...

        @typing.overload
        async def pay(money: int): ...
        async def pay(money): ...

        def _refund(): ...

        class _Clerk:
            def greet(self): ...

        if True:
            try:
                def forward(): ...
            finally:
                pass
    '''
    assert complaints(text, goods='def sell():\n    """Sell."""') == [
        "4: Till has no docstring",
        "9: Till.Drawer.coins has no docstring",
        "18: pay has no docstring",
        "27: forward has no docstring",
    ]
    assert docstrings.complaints({"shop/goods.py": "def sell(): ..."}) == [
        "shop/goods.py:1: sell has no docstring"
    ]


def test_an_override_may_leave_its_docstring_to_the_base() -> None:
    goods = '''
        class Goods:
            """Goods."""

            def sell(self):
                """Sell them. Raises ValueError if they are sold."""

            def _price(self): ...
    '''
    text = '''
        from shop.goods import Goods

        class Fruit(Goods):
            """Fruit."""

        class Apple(Fruit[int]):
            """An apple."""

            def sell(self):
                raise {error}

            def {name}(self): ...
    '''
    assert not complaints(text.format(error="ValueError", name="_eat"), goods=goods)
    assert complaints(text.format(error="KeyError", name="eat"), goods=goods) == [
        "10: Apple.sell does not tell of KeyError",
        "13: Apple.eat has no docstring",
    ]


def test_a_class_explains_init_and_forward() -> None:
    text = '''
        class Apple(Module):
            """An apple, {what}."""

            def __init__(self, seed):
                raise ValueError

            def forward(self, x: Tensor) -> Tensor: ...
    '''
    assert not complaints(text.format(what="of shape (B, T); ValueError: it is rotten"))
    assert complaints(text.format(what="red")) == [
        "5: Apple.__init__ does not tell of ValueError",
        "8: Apple.forward tells no shapes",
    ]


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ("raise ShopError", ["ShopError"]),
        ("for _ in ():\n    raise shop.ShopError('x') from None", ["ShopError"]),
        ("raise _closed()", ["TillError"]),
        ("try:\n    pass\nexcept KeyError:\n    raise ValueError from None", ["ValueError"]),
        ("try:\n    raise KeyError\nexcept OSError:\n    pass", ["KeyError"]),
        ("try:\n    raise KeyError\nexcept KeyError:\n    raise", ["KeyError"]),
        ("try:\n    raise KeyError\nexcept (KeyError, OSError) as e:\n    raise e", ["KeyError"]),
        ("with closed():\n    raise KeyError\nraise ValueError", ["KeyError", "ValueError"]),
        ("raise error", []),
        ("raise AssertionError", []),
        ("try:\n    raise KeyError\nexcept (shop.KeyError, OSError) as e:\n    print(e)", []),
        ("def inner():\n    raise KeyError", []),
    ],
)
def test_errors_that_leave_must_be_told(body: str, errors: list[str]) -> None:
    text = "def _closed() -> TillError: ...\n\ndef pay(error):\n    '''Pay.'''\n    {}"
    found = complaints(text.format(body.replace("\n", "\n    ")))
    assert found == [f"3: pay does not tell of {error}" for error in errors]


def test_an_error_is_told_by_its_own_name() -> None:
    text = 'def pay():\n    """{}."""\n    raise KeyError'
    assert complaints(text.format("Raises KeyError")) == []
    assert complaints(text.format("Raises MyKeyError")) == ["1: pay does not tell of KeyError"]


@pytest.mark.parametrize(
    ("signature", "needs"),
    [
        ("(x: Tensor)", True),
        ("(*x: torch.Tensor | None)", True),
        ("(x: 'dict[str, DTensor]')", True),
        ("(*, x: np.ndarray = None)", True),
        ("(x: Table)", True),
        ("(x_BTC: Tensor) -> Tensor", True),
        ("(x_BTC: Tensor, w_2E: Tensor | None)", False),
        ("(spec: TensorSpec)", False),
    ],
)
def test_tensors_need_shapes_unless_their_names_tell_them(signature: str, needs: bool) -> None:
    text = f'from shop.goods import Table\ndef pay{signature}:\n    """{{}}."""'
    others = {"goods": "Table = tuple[Tensor, Tensor]"}
    assert complaints(text.format("Pay"), **others) == ["2: pay tells no shapes"] * needs
    assert complaints(text.format("Pay (B, T, C)"), **others) == []


def test_the_class_or_the_module_may_tell_the_shapes() -> None:
    text = '''
        """Shopping{module}."""

        class Till:
            """A till{owner}."""

            def pay(self, x: Tensor):
                """Pay."""
    '''
    assert complaints(text.format(module="", owner="")) == ["7: Till.pay tells no shapes"]
    assert complaints(text.format(module=" (B, T)", owner="")) == []
    assert complaints(text.format(module="", owner=" (B, T)")) == []


def test_fields_need_shapes() -> None:
    text = '''
        class Till(NamedTuple):
            """A till{}."""

            coins_BT: Tensor
            notes: Tensor
            _own: Tensor
    '''
    assert complaints(text.format("")) == ["2: Till tells no shapes"]
    assert complaints(text.format("; notes are scalars")) == []
    assert complaints(text.replace("notes: Tensor", "notes: int").format("")) == []


TELLING = "int64 (2); (N / n); (rows, K + 1); (..., C); (parts,); h_BTC; 2-D; 0-dim; scalars; shape"
SILENT = "(for example); (out, lse); (SDPA); x[i]; IGNORE_INDEX; (see B, T)"


def test_what_tells_a_shape() -> None:
    text = 'def pay() -> Tensor:\n    """Pay, {}."""'
    for told in TELLING.split("; "):
        assert complaints(text.format(told)) == [], told
    for told in SILENT.split("; "):
        assert complaints(text.format(told)) == ["1: pay tells no shapes"], told
