#include "tensorstore/kvstore/chfs/turns.h"

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace {

using ::tensorstore::internal_chfs_kvstore::Turns;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

// Keeps the turns that were given, in their order.
class TurnsTest : public ::testing::Test {
 protected:
  // A turn that ends gives another one, which must still find its place.
  void TearDown() override {
    while (!held_.empty()) End(held_.front().who);
  }

  struct Held {
    std::string who;
    Turns::Turn turn;
  };

  void Take(std::string who, Turns::Kind kind, std::string path = "/a") {
    turns_.Take(std::move(path), kind, [this, who](Turns::Turn turn) { held_.push_back({who, std::move(turn)}); });
  }

  void End(std::string who) {
    for (auto it = held_.begin(); it != held_.end(); ++it) {
      if (it->who != who) continue;
      Turns::Turn turn = std::move(it->turn);
      held_.erase(it);
      return;
    }
    FAIL() << who << " has no turn";
  }

  std::vector<std::string> Running() const {
    std::vector<std::string> names;
    for (const Held& held : held_) names.push_back(held.who);
    return names;
  }

  Turns turns_;
  std::vector<Held> held_;
};

TEST_F(TurnsTest, ReadersShareAndWritersAreAlone) {
  Take("reader 1", Turns::Kind::kRead);
  Take("reader 2", Turns::Kind::kRead);
  Take("writer 1", Turns::Kind::kWrite);
  Take("writer 2", Turns::Kind::kWrite);
  EXPECT_THAT(Running(), UnorderedElementsAre("reader 1", "reader 2"));
  End("reader 1");
  EXPECT_THAT(Running(), ElementsAre("reader 2"));
  End("reader 2");
  EXPECT_THAT(Running(), ElementsAre("writer 1"));
  End("writer 1");
  EXPECT_THAT(Running(), ElementsAre("writer 2"));
  End("writer 2");
  EXPECT_THAT(Running(), ElementsAre());
}

TEST_F(TurnsTest, FirstComeFirstServed) {
  Take("writer 1", Turns::Kind::kWrite);
  Take("reader 1", Turns::Kind::kRead);
  Take("reader 2", Turns::Kind::kRead);
  Take("writer 2", Turns::Kind::kWrite);
  Take("reader 3", Turns::Kind::kRead);
  End("writer 1");
  EXPECT_THAT(Running(), UnorderedElementsAre("reader 1", "reader 2"));
  // A writer that waits is not passed by readers that come later.
  Take("reader 4", Turns::Kind::kRead);
  End("reader 1");
  End("reader 2");
  EXPECT_THAT(Running(), ElementsAre("writer 2"));
  End("writer 2");
  EXPECT_THAT(Running(), UnorderedElementsAre("reader 3", "reader 4"));
}

TEST_F(TurnsTest, ObjectsDoNotWaitForEachOther) {
  Take("a", Turns::Kind::kWrite, "/a");
  Take("b", Turns::Kind::kWrite, "/b");
  EXPECT_THAT(Running(), UnorderedElementsAre("a", "b"));
}

TEST_F(TurnsTest, ATurnEndsOnce) {
  Take("writer 1", Turns::Kind::kWrite);
  Take("writer 2", Turns::Kind::kWrite);
  Take("writer 3", Turns::Kind::kWrite);
  {
    Turns::Turn turn = std::move(held_.front().turn);
    held_.erase(held_.begin());
    turn.End();
    turn.End();
  }
  EXPECT_THAT(Running(), ElementsAre("writer 2"));
}

}  // namespace
