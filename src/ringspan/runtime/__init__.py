"""The call on real ranks: checked, agreed upon, run."""

__all__: list[str] = []
