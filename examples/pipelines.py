"""Pipeline schedules on paper: bubbles of four of them, and one that is searched for."""

import moemesh as mm

costs = mm.schedules.Costs(forward=2, input_gradient=2, weight_gradient=1, message=1)
for name in ("gpipe", "1f1b", "zb_h1", "zb_v"):
    found = mm.simulate(mm.schedules.build(name, 4, 8), costs)
    print(f"{name:6} takes {found.makespan} ticks, bubble {found.bubble_rate:.1%}")

searched = mm.schedules.search(4, 8, costs, memory_cap=4).schedule
mm.schedules.check(searched)  # raises for a deadlock or a missing operation
print(f"search takes {mm.simulate(searched, costs).makespan} ticks")
print(mm.schedules.to_text(mm.schedules.zb_h1(2, 3)))
