#include "in_flight.h"
#include "async.h"
#include "race.h"

bool flies(Order order, Scope scope, const Location &at) {
  return machine.gpus.size() > 1 && machine.deferring() && at.global && order == Order::Relaxed && scope == kSysScope;
}

void store_in_flight(Warp &w, const Instruction &in, Scope scope, u8 *data, const u32 *words, u32 count) {
  Cluster &c = *w.cta->cluster;
  settle_in_flight(c, data, 4 * count);
  struct Message {
    u32 left;
    std::unique_ptr<HandedOn> handed;
  };
  auto message = std::make_shared<Message>(Message{count, race::handed_on(w, true, scope)});
  for (u32 k = 0; k < count; k++) {
    u8 *place = data + 4 * k;
    u32 word = words[k];
    AsyncPtr op = make_async(in, "store", [&w, data, place, word, scope, message] {
      memcpy(place, &word, 4);
      if (--message->left == 0 && message->handed) race::publish(w, data, *message->handed, scope);
      machine.progress++;
    });
    c.in_flight[(u64)place] = op;
    c.free_running.push_back(op);
  }
}

void settle_in_flight(Cluster &c, const u8 *data, u64 bytes) {
  for (u64 place = (u64)data & ~3ull; !c.in_flight.empty() && place < (u64)data + bytes; place += 4)
    if (auto it = c.in_flight.find(place); it != c.in_flight.end()) {
      it->second->complete();
      c.in_flight.erase(it);
    }
}

void settle_in_flight(Cluster &c) {
  for (auto &[place, op] : c.in_flight) op->complete();
  c.in_flight.clear();
}
