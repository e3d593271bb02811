"""The block pool against a model of a few lines: lists instead of links, whole prefixes instead of hashes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_worker.core.block_pool import BlockPool, Registered, hash_block, root_hash
from engine_worker.core.types import BlockHash, BlockId

ROOT = root_hash(b"model", "")
Prefix = tuple[int, ...]  # one token a block


def name_of(prefix: Prefix) -> BlockHash:
    name = ROOT
    for token in prefix:
        name = hash_block(name, (token,))
    return name


@dataclass
class Table:
    """`prefix` names the leading blocks. After the cache was cleared a table names no more."""

    block_ids: list[BlockId]
    prefix: Prefix = ()
    names: bool = True


@dataclass
class Model:
    free: list[BlockId]  # in eviction order
    carries: dict[BlockId, Prefix] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def held(self) -> set[BlockId]:
        return {block_id for table in self.tables for block_id in table.block_ids}

    def copies(self, prefix: Prefix) -> list[BlockId]:
        return [block_id for block_id, carried in self.carries.items() if carried == prefix]

    def make_worthless(self, block_id: BlockId) -> None:
        del self.carries[block_id]
        if block_id in self.free:
            self.free.remove(block_id)
            self.free.insert(0, block_id)

    def drop(self, table: Table) -> None:
        self.tables.remove(table)
        for block_id in reversed(table.block_ids):
            if block_id in self.held():
                continue
            if block_id in self.carries and len(self.copies(self.carries[block_id])) > 1:
                del self.carries[block_id]
            self.free.insert(len(self.free) if block_id in self.carries else 0, block_id)


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.model = Model(free=[BlockId(i) for i in range(num_blocks)])

    def pick(self, data: st.DataObject, names: bool = False) -> Table | None:
        tables = [t for t in self.model.tables if not names or (t.names and len(t.prefix) < len(t.block_ids))]
        return data.draw(st.sampled_from(tables)) if tables else None

    @rule(wanted=st.lists(st.integers(0, 1), max_size=5), data=st.data())
    def open_table(self, wanted: list[int], data: st.DataObject) -> None:
        """Hits the longest cached prefix of `wanted`, then takes some new blocks."""
        hit: list[BlockId] = []
        for i, token in enumerate(wanted):
            copies = self.model.copies(tuple(wanted[: i + 1]))
            parent = name_of(tuple(wanted[:i]))
            found = self.pool.find(hash_block(parent, (token,)), parent, (token,))
            assert (found in copies) if copies else (found is None)
            if found is None:
                break
            hit.append(found)
        self.pool.take(hit)
        self.model.free = [block_id for block_id in self.model.free if block_id not in hit]
        self.model.tables.append(Table(list(hit), tuple(wanted[: len(hit)])))
        self.grow_table(self.model.tables[-1], data.draw(st.integers(0, len(self.model.free))))

    @precondition(lambda self: self.model.tables and self.model.free)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        table = self.pick(data)
        assert table is not None
        self.grow_table(table, data.draw(st.integers(1, len(self.model.free))))

    def grow_table(self, table: Table, count: int) -> None:
        expected, self.model.free = self.model.free[:count], self.model.free[count:]
        evicted = [name_of(self.model.carries.pop(b)) for b in expected if b in self.model.carries]
        assert self.pool.allocate(count) == (expected, evicted)
        table.block_ids.extend(expected)

    @rule(token=st.integers(0, 1), data=st.data())
    def name_next(self, token: int, data: st.DataObject) -> None:
        table = self.pick(data, names=True)
        if table is None:
            return
        block_id, prefix = table.block_ids[len(table.prefix)], (*table.prefix, token)
        twins = self.model.copies(prefix)
        parent = name_of(table.prefix)
        outcome = self.pool.register(
            block_id, hash_block(parent, (token,)), parent, (token,), is_first=not table.prefix
        )
        assert outcome is (Registered.DUPLICATE if twins else Registered.NEW)
        for twin in twins:
            if twin in self.model.free:
                self.model.make_worthless(twin)
        self.model.carries[block_id] = table.prefix = prefix

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def close_table(self, data: st.DataObject) -> None:
        table = self.pick(data)
        assert table is not None
        self.model.drop(table)
        self.pool.free(table.block_ids)

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        self.model.carries.clear()
        for table in self.model.tables:
            table.names = False

    @invariant()
    def agree(self) -> None:
        expected = [(b, name_of(self.model.carries[b]) if b in self.model.carries else None) for b in self.model.free]
        assert self.pool.eviction_order() == expected
        assert self.pool.num_free == len(self.model.free)
        assert self.pool.num_cached == len(set(self.model.carries.values()))
        self.pool.check_invariants([table.block_ids for table in self.model.tables])


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
TestBlockPoolAgainstModel = PoolMachine.TestCase
