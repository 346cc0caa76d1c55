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


def test_public_names_need_docstrings() -> None:
    assert complaints(
        '''
        class Till:
            class Drawer:
                """A drawer."""

                @property
                def coins(self): return 3

            def _count(self): ...

        async def pay(): ...

        def _refund(): ...

        class _Clerk:
            def greet(self): ...
        '''
    ) == [
        "2: Till has no docstring",
        "7: Till.Drawer.coins has no docstring",
        "11: pay has no docstring",
    ]


def test_a_branch_hides_no_name() -> None:
    assert complaints("if True:\n    try:\n        def pay(): ...\n    finally:\n        pass") == [
        "3: pay has no docstring"
    ]


def test_a_name_counts_where_it_is_defined() -> None:
    sources = {"shop/goods.py": "def sell(): ...", "shop/till.py": "from shop.goods import sell"}
    assert docstrings.complaints(sources) == ["shop/goods.py:1: sell has no docstring"]


def test_setters_and_overloads_need_no_docstring_of_their_own() -> None:
    assert not complaints(
        '''
        @overload
        def pay(money: int) -> int: ...
        @typing.overload
        def pay(money: str) -> str: ...
        def pay(money):
            """Pay."""

        class Till:
            """A till."""

            @property
            def coins(self):
                """The number of coins."""

            @coins.setter
            def coins(self, number): ...
        '''
    )


GOODS = '''
    class Goods:
        """Goods."""

        def sell(self):
            """Sell them.

            Raises:
                ValueError: they are sold.
            """

        def price(self): ...
'''


def test_an_override_may_leave_its_docstring_to_the_base() -> None:
    text = '''
        from shop import Goods

        class Fruit(Goods):
            """Fruit."""

        class Apple(Fruit[int]):
            """An apple."""

            def sell(self):
                raise {error}

            def {name}(self): ...
    '''
    start = "from shop.goods import Goods"
    others = {"__init__": start, "goods": GOODS.replace("def price", "def _price")}
    assert not complaints(text.format(error="ValueError", name="_eat"), **others)
    assert complaints(text.format(error="KeyError", name="eat"), **others) == [
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


def test_only_a_method_can_leave_its_docstring_to_a_class() -> None:
    assert complaints('"""Of (B, T)."""\ndef forward(x): ...') == ["2: forward has no docstring"]


RAISING = '''
    from contextlib import contextmanager, suppress

    from shop.errors import ShopError, TillError

    KINDS = (TillError, KeyError)

    def _closed() -> TillError: ...

    @contextmanager
    def _as_shop_error(place):
        try:
            yield
        except KINDS as error:
            raise ShopError(place) from error

    def pay(error):
        """Pay."""
        {body}
'''
ERRORS = '''
    class ShopError(Exception):
        """An error."""

    class TillError(ShopError):
        """The till is closed."""
'''


def raising(body: str) -> list[str]:
    """The complaints about a function with this body, which must be about errors."""
    text = dedent(RAISING).replace("{body}", body.replace("\n", "\n    "))
    found = complaints(text, errors=ERRORS)
    return [line.partition(": pay does not tell of ")[2] for line in found]


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ("raise ShopError", ["ShopError"]),
        ("for _ in ():\n    raise shop.ShopError('x') from None", ["ShopError"]),
        ("raise _closed()", ["TillError"]),
        ("try:\n    pass\nexcept KeyError:\n    raise ValueError from None", ["ValueError"]),
        ("try:\n    raise KeyError\nexcept OSError:\n    pass", ["KeyError"]),
        ("try:\n    raise KeyError\nexcept KeyError:\n    raise", ["KeyError"]),
        ("try:\n    raise TillError\nexcept KINDS as e:\n    raise e", ["TillError"]),
        ("with _as_shop_error('x'):\n    raise ShopError", ["ShopError"]),
        ("raise KeyError\nraise ValueError", ["KeyError", "ValueError"]),
    ],
)
def test_raised_errors_must_be_told(body: str, errors: list[str]) -> None:
    assert raising(body) == errors


@pytest.mark.parametrize(
    "body",
    [
        "raise error",
        "raise AssertionError",
        "try:\n    raise KeyError\nexcept KeyError:\n    pass",
        "try:\n    raise KeyError\nexcept LookupError:\n    pass",
        "try:\n    raise KeyError\nexcept:\n    pass",
        "try:\n    raise TillError\nexcept (ShopError, OSError) as e:\n    print(e)",
        "try:\n    raise TillError\nexcept KINDS:\n    pass",
        "with suppress(ShopError):\n    raise TillError",
        "with _as_shop_error('x'):\n    raise KeyError",
        "def inner():\n    raise KeyError",
    ],
)
def test_errors_that_do_not_leave_are_not_asked_for(body: str) -> None:
    assert raising(body) == []


def test_an_error_is_told_by_its_own_name() -> None:
    text = 'def pay():\n    """{}."""\n    raise KeyError'
    assert complaints(text.format("Raises KeyError")) == []
    assert complaints(text.format("Raises MyKeyError")) == ["1: pay does not tell of KeyError"]


@pytest.mark.parametrize(
    "signature",
    [
        "(x: Tensor)",
        "(*x: torch.Tensor | None)",
        "(x: 'dict[str, DTensor]')",
        "(*, x: np.ndarray = None)",
        "(x: Table)",
        "(x_BTC: Tensor) -> Tensor",
    ],
)
def test_tensors_need_shapes(signature: str) -> None:
    text = f'from shop.goods import Table\ndef pay{signature}:\n    """{{}}."""'
    others = {"goods": "Table = tuple[Tensor, Tensor]"}
    assert complaints(text.format("Pay"), **others) == ["2: pay tells no shapes"]
    assert complaints(text.format("Pay (B, T, C)"), **others) == []


@pytest.mark.parametrize("signature", ["x_BTC: Tensor, w_2E: Tensor | None", "spec: TensorSpec"])
def test_a_shape_in_the_name_is_enough(signature: str) -> None:
    assert complaints(f'def pay({signature}):\n    """Pay."""') == []


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


@pytest.mark.parametrize(
    "told",
    [
        "int64 (2)",
        "(N / n)",
        "(rows, K + 1)",
        "(..., C)",
        "(parts,)",
        "return h_BTC",
        "2-D",
        "0-dim",
        "scalars",
        "any shape",
    ],
)
def test_what_tells_a_shape(told: str) -> None:
    assert complaints(f'def pay() -> Tensor:\n    """Pay, {told}."""') == []


@pytest.mark.parametrize(
    "told", ["(for example)", "(out, lse)", "(SDPA)", "x[i]", "IGNORE_INDEX", "(see B, T)"]
)
def test_what_tells_no_shape(told: str) -> None:
    text = f'def pay() -> Tensor:\n    """Pay, {told}."""'
    assert complaints(text) == ["1: pay tells no shapes"]
