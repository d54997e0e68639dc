//! Conversations that wander over processes at random: what is prefilled in all is what was new,
//! within the last partial block of each turn, where it would grow with the square of the turns
//! without kvtide.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use kvtide_tests::Setup;
use kvtide_tests::inference::assert_same_bits;
use smallengine::process::EngineArgs;
use smallengine::random_tokens;

const NODE: &str = env!("CARGO_BIN_EXE_kvtide-test-node");
const CONVERSATIONS: usize = 8;
const TURNS: usize = 20;
const PROCESSES: usize = 4;
const SYSTEM_TOKENS: usize = 100;
const MESSAGE_TOKENS: usize = 21;
const ANSWER_TOKENS: usize = 7;
const TOKENS_PER_BLOCK: usize = 16;

#[derive(Clone)]
struct Conversation {
    /// What was said.
    tokens: Vec<u32>,
    /// Tokens of it whose KV lies in full blocks that were stored.
    stored: usize,
    turns: usize,
}

#[test]
fn eight_conversations_over_four_processes_compute_what_is_new() {
    let setup = Setup::new(NODE);
    let mut daemon = setup.start();
    let args = EngineArgs { seed: 41, threads: 1, ..EngineArgs::default() };
    let mut engines: Vec<_> = (0..PROCESSES).map(|_| setup.inference(&args)).collect();
    let mut alone = setup.inference_alone(&args);
    let system = random_tokens(1, SYSTEM_TOKENS, 512);
    let new = Conversation { tokens: system.clone(), stored: 0, turns: 0 };
    let mut conversations = vec![new; CONVERSATIONS];
    let mut table = vec![(0, 0, 0); TURNS];
    // Which conversation and which process, a step at a time.
    let mut chance = random_tokens(99, 1 << 16, 1 << 20).into_iter();
    let mut pick = |below: usize| chance.next().unwrap() as usize % below;
    for step in 0..CONVERSATIONS * TURNS {
        let open: Vec<usize> =
            (0..CONVERSATIONS).filter(|at| conversations[*at].turns < TURNS).collect();
        let number = open[pick(open.len())];
        let conversation = &mut conversations[number];
        let seed = (1000 + number * 100 + conversation.turns) as u64;
        conversation.tokens.extend(random_tokens(seed, MESSAGE_TOKENS, 512));
        let said = conversation.tokens.len();
        let done = engines[pick(PROCESSES)]
            .turn(number as u64 + 1, &conversation.tokens, ANSWER_TOKENS)
            .unwrap();
        // The system prompt is known from the first conversation on.
        let known = match (step, conversation.turns) {
            (0, _) => 0,
            (_, 0) => SYSTEM_TOKENS / TOKENS_PER_BLOCK * TOKENS_PER_BLOCK,
            _ => conversation.stored,
        };
        assert_eq!(done.turn.reuse.tokens(), known, "conversation {number}, step {step}");
        assert_eq!(done.turn.recomputed_tokens, said - known);
        if step % 16 == 0 {
            let right = alone.turn(1, &conversation.tokens, ANSWER_TOKENS).unwrap();
            assert_same_bits(&done, &right, "a turn on a process that did not have the last one");
        }
        let row = &mut table[conversation.turns];
        *row = (row.0 + said, row.1 + done.turn.recomputed_tokens, row.2 + 1);
        conversation.tokens.extend(&done.answer);
        let whole = (conversation.tokens.len() - 1) / TOKENS_PER_BLOCK;
        conversation.stored = whole * TOKENS_PER_BLOCK;
        conversation.turns += 1;
    }
    let (mut without, mut with) = (0, 0);
    println!("turn  prompt tokens  prefilled  in all without reuse  with it");
    for (turn, (said, computed, conversations)) in table.iter().enumerate() {
        assert_eq!(*conversations, CONVERSATIONS);
        (without, with) = (without + said, with + computed);
        println!("{:>4}  {said:>13}  {computed:>9}  {without:>20}  {with:>7}", turn + 1);
    }
    // The system prompt, the messages, and the last token of each answer that was gone on from,
    // which the decoding did not compute; and less than a block more in each turn.
    let once = SYSTEM_TOKENS + CONVERSATIONS * (TURNS * MESSAGE_TOKENS + TURNS - 1);
    let bound = once + CONVERSATIONS * TURNS * (TOKENS_PER_BLOCK - 1);
    println!("new tokens: {once}; prefilled: {with}; without reuse: {without}");
    assert!(with <= bound, "{with} tokens were prefilled, {once} were new");
    assert!(without > 5 * with, "{without} without reuse, {with} with it");
    daemon.assert_healthy();
}
