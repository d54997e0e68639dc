//! After how long requests of a class are continued: survival curves, learned from what was seen.
//!
//! For every class, returns and waits that ended without one are counted by age, in buckets of half
//! an octave. From these follow the chance of a return in each bucket (Kaplan and Meier's
//! estimate, drawn towards that of all classes together while a class has little of its own), and
//! from the chances the score of a block of that class and age: the most hits for the time it is
//! kept that any horizon promises.

/// Classes of requests.
pub(crate) const CLASSES: usize = 78;

/// Requests that nothing is known of: they get what all together promise.
pub(crate) const UNKNOWN: u8 = 35;

/// The engine says that nobody will come back.
pub(crate) const FINISHED: u8 = 36;

/// The first of the classes whose engine says that somebody will: one for each of those without
/// hints, then five that say when.
pub(crate) const OPEN: u8 = 37;

/// The first of those five.
pub(crate) const SOON: u8 = OPEN + 35;

/// Blocks that are shorter than others, so that no path goes on behind them. They promise nothing.
pub(crate) const SHORT: u8 = SOON + 5;

/// In how many units of time they say that most return: a minute for a tool, then 10 s, a minute,
/// ten, and an hour.
const SOON_STEPS: [f32; 5] = [916.0, 153.0, 916.0, 9_155.0, 54_932.0];

/// Buckets of ages. The last one holds all that is older.
const BUCKETS: usize = 40;

/// Units of time in the first bucket: about a second. Later ones grow by half an octave.
const FIRST: u32 = 16;

/// Returns of all classes together that weigh as much as a class's own.
const POOLED_WEIGHT: f32 = 8.0;

/// What is left of every count at the next fit.
const DECAY: f32 = 0.99;

type Counts = [f32; BUCKETS];

/// What was seen of one class, and what follows.
#[derive(Clone)]
struct Curve {
    returned: Counts,
    /// Waits that ended otherwise.
    ended: Counts,
    /// By age: the best rate of hits, and the chance of any.
    rate: Counts,
    chance: Counts,
}

/// The curves of all classes.
pub(crate) struct Survival {
    curves: Vec<Curve>,
}

/// The bucket of an age in units of time.
fn bucket(age: u32) -> usize {
    if age < FIRST {
        return 0;
    }
    let octave = age.ilog2();
    let half = u64::from(age) * u64::from(age) >= 2 << (2 * octave);
    let at = 1 + 2 * (octave - FIRST.ilog2()) as usize + usize::from(half);
    at.min(BUCKETS - 1)
}

/// Units of time in a bucket.
fn width(bucket: usize) -> f32 {
    let start = |at: usize| match at {
        0 => 0.0,
        at => FIRST as f32 * ((at - 1) as f32 / 2.0).exp2(),
    };
    start(bucket + 1) - start(bucket)
}

/// How many had reached each bucket of those that are counted where they ended.
fn reached(ends: &Counts) -> Counts {
    let mut reached = *ends;
    let mut sum = 0.0;
    for count in reached.iter_mut().rev() {
        sum += *count;
        *count = sum;
    }
    reached
}

fn add(to: &mut Counts, more: &Counts) {
    to.iter_mut().zip(more).for_each(|(to, more)| *to += more);
}

fn count(counts: &mut Counts, age: u32, weight: f32) {
    if let Some(count) = counts.get_mut(bucket(age)) {
        *count += weight;
    }
}

impl Survival {
    pub(crate) fn new() -> Survival {
        let none = [0.0; BUCKETS];
        let curve = Curve { returned: none, ended: none, rate: none, chance: none };
        Survival { curves: vec![curve; CLASSES] }
    }

    /// A request of this class was continued at this age.
    pub(crate) fn returned(&mut self, class: u8, age: u32) {
        if let Some(curve) = self.curves.get_mut(usize::from(class)) {
            count(&mut curve.returned, age, 1.0);
        }
    }

    /// It was not until this age, and is not watched any more.
    pub(crate) fn ended(&mut self, class: u8, age: u32) {
        if let Some(curve) = self.curves.get_mut(usize::from(class)) {
            count(&mut curve.ended, age, 1.0);
        }
    }

    /// Takes account of what was counted, and of the requests that are still waited for.
    pub(crate) fn fit(&mut self, waiting: impl Iterator<Item = (u8, u32)>) {
        let none = [0.0; BUCKETS];
        let mut ended: Vec<Counts> = self.curves.iter().map(|curve| curve.ended).collect();
        for (class, age) in waiting {
            if let Some(counts) = ended.get_mut(usize::from(class)) {
                count(counts, age, 1.0);
            }
        }
        let (mut all_returned, mut all_ended) = (none, none);
        for ((class, curve), ended) in (0..).zip(&self.curves).zip(&ended) {
            // Whoever is told that it is over says nothing about the others.
            if class == FINISHED {
                continue;
            }
            add(&mut all_returned, &curve.returned);
            add(&mut all_ended, ended);
        }
        let pooled = hazards(&all_returned, &all_ended, &none, 1.0);
        let mut fitted = Vec::with_capacity(CLASSES);
        for ((class, curve), ended) in (0u8..).zip(&mut self.curves).zip(&ended) {
            // What an engine says is believed until it proves wrong.
            let prior = match class {
                FINISHED | SHORT => none,
                class if class >= SOON => within(SOON_STEPS.get(usize::from(class - SOON))),
                class if class >= OPEN => {
                    given_return(fitted.get(usize::from(class - OPEN)).unwrap_or(&pooled))
                }
                _ => pooled,
            };
            let hazards = hazards(&curve.returned, ended, &prior, POOLED_WEIGHT);
            (curve.rate, curve.chance) = promises(&hazards);
            fitted.push(hazards);
            curve.returned.iter_mut().for_each(|count| *count *= DECAY);
            curve.ended.iter_mut().for_each(|count| *count *= DECAY);
        }
    }

    /// The most hits for a unit of time that any horizon promises.
    pub(crate) fn rate(&self, class: u8, age: u32) -> f32 {
        let curve = self.curves.get(usize::from(class));
        curve.and_then(|curve| curve.rate.get(bucket(age))).copied().unwrap_or(0.0)
    }

    /// The chance that the request is ever continued.
    pub(crate) fn chance(&self, class: u8, age: u32) -> f32 {
        let curve = self.curves.get(usize::from(class));
        curve.and_then(|curve| curve.chance.get(bucket(age))).copied().unwrap_or(0.0)
    }
}

/// The chance of a return in each bucket for those that reach it. Of those that ended there without
/// one, half count as having been there.
fn hazards(returned: &Counts, ended: &Counts, prior: &Counts, weight: f32) -> Counts {
    let mut all = *returned;
    add(&mut all, ended);
    let reached = reached(&all);
    let mut hazards = [0.0; BUCKETS];
    let counts = returned.iter().zip(ended).zip(&reached).zip(prior);
    for (hazard, (((returned, ended), reached), prior)) in hazards.iter_mut().zip(counts) {
        let at_risk = reached - ended / 2.0;
        *hazard = ((returned + weight * prior) / (at_risk + weight)).min(1.0);
    }
    hazards
}

/// The hazards among those of which it is known that they return: of every bucket, its part of the
/// returns from there on.
fn given_return(hazards: &Counts) -> Counts {
    let (mut returns, mut still) = ([0.0; BUCKETS], 1.0);
    for (returns, hazard) in returns.iter_mut().zip(hazards) {
        *returns = still * hazard;
        still *= 1.0 - hazard;
    }
    let later = reached(&returns);
    let mut given = returns;
    for (given, later) in given.iter_mut().zip(later) {
        *given = if later > 0.0 { (*given / later).min(1.0) } else { 0.0 };
    }
    given
}

/// The hazards of a return at any time, most of them within so many units.
fn within(steps: Option<&f32>) -> Counts {
    let mean = steps.copied().unwrap_or(1.0) / 2.0;
    let mut hazards = [0.0; BUCKETS];
    for (at, hazard) in hazards.iter_mut().enumerate() {
        *hazard = 1.0 - (-width(at) / mean).exp();
    }
    hazards
}

/// For each age: the best rate over all horizons, and the chance of a return at all.
fn promises(hazards: &Counts) -> (Counts, Counts) {
    let (mut rates, mut chances): (Counts, Counts) = ([0.0; BUCKETS], [0.0; BUCKETS]);
    for (from, (rate, chance)) in rates.iter_mut().zip(&mut chances).enumerate() {
        let (mut still, mut hits, mut time) = (1.0f32, 0.0f32, 0.0f32);
        for (at, hazard) in hazards.iter().enumerate().skip(from) {
            time += still * width(at) * (1.0 - hazard / 2.0);
            hits += still * hazard;
            still *= 1.0 - hazard;
            *rate = rate.max(hits / time);
        }
        *chance = hits;
    }
    (rates, chances)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another() {
        let mut last = 0;
        for age in 0..1_000_000u32 {
            let at = bucket(age);
            assert!(at == last || at == last + 1, "age {age}");
            last = at;
        }
        assert_eq!((bucket(15), bucket(16), bucket(22), bucket(23), bucket(32)), (0, 1, 1, 2, 3));
        assert_eq!(bucket(u32::MAX), BUCKETS - 1);
    }

    #[test]
    fn what_returns_soon_is_worth_more_than_what_returns_late_or_never() {
        let mut survival = Survival::new();
        for _ in 0..200 {
            survival.returned(0, 100);
            survival.returned(1, 10_000);
            survival.ended(2, 20_000);
        }
        survival.fit(std::iter::empty());
        assert!(survival.rate(0, 50) > 2.0 * survival.rate(1, 50));
        assert!(survival.rate(1, 5_000) > 2.0 * survival.rate(2, 5_000));
        assert!(survival.chance(1, 50) > 0.8 && survival.chance(2, 50) < 0.2);
        // Long past the usual time nothing is left to hope for.
        assert!(survival.rate(0, 2_000) < survival.rate(0, 50) / 10.0);
    }

    #[test]
    fn hints_are_believed_until_they_prove_wrong() {
        let mut survival = Survival::new();
        (0..200).for_each(|_| survival.returned(0, 100));
        survival.fit(std::iter::empty());
        assert_eq!(survival.rate(FINISHED, 50), 0.0);
        assert!((0..OPEN).all(|class| survival.rate(OPEN, 50) >= survival.rate(class, 50)));
        assert!(survival.chance(OPEN, 50) > 0.99);
        assert!(survival.rate(SOON + 1, 5) > 5.0 * survival.rate(SOON + 3, 5));
        (0..200).for_each(|_| survival.returned(FINISHED, 100));
        survival.fit(std::iter::empty());
        assert!(survival.rate(FINISHED, 50) > survival.rate(UNKNOWN, 50) / 2.0);
    }
}
