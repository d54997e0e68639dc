//! Line charts as SVG, written by hand: no fonts, scripts or files are loaded, and the colours
//! follow the reader's light or dark scheme.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 52.0;
const BOTTOM: f64 = 60.0;

/// Distance between the baselines of two names that would lie over each other.
const NAME_STEP: f64 = 17.0;

/// An axis.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// What it is, and in which unit.
    pub(super) label: String,
    /// Logarithmic; all values must be above 0 then.
    pub(super) log: bool,
    /// Where to put marks; at round numbers when empty.
    pub(super) marks: Vec<f64>,
}

/// A line with its name.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// A chart.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) lines: Vec<Line>,
}

/// An axis with the range that it shows.
struct Scale {
    log: bool,
    from: f64,
    to: f64,
    marks: Vec<f64>,
}

impl Scale {
    fn of(axis: &Axis, values: impl Iterator<Item = f64>) -> Scale {
        let usable = values.filter(|value| value.is_finite() && (!axis.log || *value > 0.0));
        let (least, most) = usable
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(value), b.max(value)));
        if least > most {
            return Scale { log: false, from: 0.0, to: 1.0, marks: vec![0.0, 1.0] };
        }
        if axis.log {
            let (from, to) = match axis.marks.is_empty() {
                true => (10f64.powf(least.log10().floor()), 10f64.powf(most.log10().ceil())),
                false => (least, most),
            };
            let to = if to > from { to } else { from * 10.0 };
            let powers = from.log10().round() as i32..=to.log10().round() as i32;
            let marks = match axis.marks.is_empty() {
                true => powers.map(|power| 10f64.powi(power)).collect(),
                false => axis.marks.clone(),
            };
            return Scale { log: true, from, to, marks };
        }
        let from = least.min(0.0);
        let step = round_step((most - from).max(1e-9) / 5.0);
        let steps = ((most - from) / step).ceil().max(1.0) as u32;
        let marks = (0..=steps).map(|number| from + f64::from(number) * step).collect();
        Scale { log: false, from, to: from + f64::from(steps) * step, marks }
    }

    /// Where a value lies, from 0 to 1.
    fn at(&self, value: f64) -> f64 {
        if self.log {
            let place = |value: f64| value.max(f64::MIN_POSITIVE).log10();
            (place(value) - place(self.from)) / (place(self.to) - place(self.from))
        } else {
            (value - self.from) / (self.to - self.from)
        }
    }
}

/// 1, 2 or 5 times a power of ten, at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps.into_iter().find(|round| *round >= step * 0.999_999).unwrap_or(power * 10.0)
}

/// A number under a mark: `0.01`, `5`, `12k`.
fn mark(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 1024.0 && value % 1024.0 == 0.0 => format!("{}k", value / 1024.0),
        size if size >= 10_000.0 => format!("{}k", value / 1000.0),
        _ => format!("{}", (value * 1e6).round() / 1e6),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

impl Chart {
    /// The picture.
    pub(super) fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| line.points.iter());
        let x = Scale::of(&self.x, points().map(|point| point.0));
        let y = Scale::of(&self.y, points().map(|point| point.1));
        let place = |(at_x, at_y): (f64, f64)| {
            let right = LEFT + x.at(at_x) * (WIDTH - LEFT - RIGHT);
            let down = HEIGHT - BOTTOM - y.at(at_y) * (HEIGHT - TOP - BOTTOM);
            (right, down)
        };
        let mut out = head(&self.title);
        self.grid(&mut out, &x, &y, place);
        self.draw(&mut out, place);
        out.push_str("</svg>\n");
        out
    }

    fn grid(
        &self,
        out: &mut String,
        x: &Scale,
        y: &Scale,
        place: impl Fn((f64, f64)) -> (f64, f64),
    ) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for value in &y.marks {
            let (_, at) = place((x.from, *value));
            let text = mark(*value);
            let _ = writeln!(
                out,
                r#"<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1}" y2="{at:.1}"/>
<text class="small" text-anchor="end" x="{:.1}" y="{:.1}">{text}</text>"#,
                LEFT - 8.0,
                at + 4.0
            );
        }
        for value in &x.marks {
            let (at, _) = place((*value, y.from));
            let text = mark(*value);
            let _ = writeln!(
                out,
                r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{TOP}" y2="{bottom}"/>
<text class="small" text-anchor="middle" x="{at:.1}" y="{:.1}">{text}</text>"#,
                bottom + 18.0
            );
        }
        let (middle, half) = (LEFT + (right - LEFT) / 2.0, TOP + (bottom - TOP) / 2.0);
        let _ = writeln!(
            out,
            r#"<text text-anchor="middle" x="{middle:.1}" y="{:.1}">{}</text>
<text text-anchor="middle" transform="rotate(-90 22 {half:.1})" x="22" y="{half:.1}">{}</text>"#,
            HEIGHT - 16.0,
            escaped(&self.x.label),
            escaped(&self.y.label)
        );
    }

    /// The lines, with their names behind their ends, pushed apart where they would meet.
    fn draw(&self, out: &mut String, place: impl Fn((f64, f64)) -> (f64, f64)) {
        let mut names: Vec<(f64, f64, usize)> = Vec::new();
        for (number, line) in self.lines.iter().enumerate() {
            let class = number % 4;
            let points: Vec<(f64, f64)> = line.points.iter().map(|point| place(*point)).collect();
            let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let list = list.join(" ");
            let _ = writeln!(out, r#"<polyline class="line l{class}" points="{list}"/>"#);
            for (x, y) in &points {
                let _ =
                    writeln!(out, r#"<circle class="c{class}" cx="{x:.1}" cy="{y:.1}" r="4"/>"#);
            }
            names.extend(points.last().map(|(x, y)| (*y, *x, number)));
        }
        names.sort_by(|one, two| one.0.total_cmp(&two.0));
        let mut least = 0.0;
        for (y, x, number) in names {
            let at = y.max(least);
            least = at + NAME_STEP;
            let name = self.lines.get(number).map_or("", |line| line.name.as_str());
            let _ = writeln!(
                out,
                r#"<text class="t{}" x="{:.1}" y="{:.1}">{}</text>"#,
                number % 4,
                x + 12.0,
                at + 4.0,
                escaped(name)
            );
        }
    }
}

/// Start, style and title. The colours keep apart also for who cannot tell red from green.
fn head(title: &str) -> String {
    let colours = |list: [&str; 4]| {
        let rule = |(number, colour): (usize, &&str)| {
            format!(".l{number}{{stroke:{colour}}}.c{number},.t{number}{{fill:{colour}}}")
        };
        list.iter().enumerate().map(rule).collect::<String>()
    };
    let light = colours(["#b4420f", "#0b63b0", "#1a7a50", "#7a3d9a"]);
    let dark = colours(["#ff9d6b", "#6db8ff", "#5fd3a0", "#d3a0f0"]);
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">
<title>{title}</title>
<style>
text{{font:14px system-ui,sans-serif;fill:#222}}
.small{{font-size:12px}}.title{{font-size:16px;font-weight:600}}
.page{{fill:#fff}}.grid{{stroke:#ddd}}.line{{fill:none;stroke-width:2.5}}
.l1{{stroke-dasharray:8 4}}.l2{{stroke-dasharray:2 4}}
{light}
@media (prefers-color-scheme:dark){{
text{{fill:#ddd}}.page{{fill:#14171a}}.grid{{stroke:#3a3f45}}
{dark}
}}
</style>
<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>
<text class="title" x="{LEFT}" y="30">{title}</text>
"#,
        title = escaped(title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(log: bool) -> Axis {
        Axis { label: "tokens & <more>".into(), log, marks: Vec::new() }
    }

    #[test]
    fn a_chart_has_its_lines_names_and_units_and_stays_within_its_frame() {
        let line = |name: &str, scale: f64| Line {
            name: name.into(),
            points: [256.0, 1024.0, 4096.0].map(|x| (x, x * scale)).to_vec(),
        };
        let lines = vec![line("recompute", 0.01), line("from nvme", 0.0001)];
        for (log_x, log_y) in [(true, true), (false, false)] {
            let chart =
                Chart { title: "t".into(), x: axis(log_x), y: axis(log_y), lines: lines.clone() };
            let svg = chart.svg();
            for part in ["<svg", "</svg>", "recompute", "from nvme", "tokens &amp; &lt;more&gt;"] {
                assert!(svg.contains(part), "{part} in {svg}");
            }
            assert_eq!(svg.matches("<polyline").count(), 2);
            assert_eq!(svg.matches("<circle").count(), 6);
            for number in svg.split(['"', ',', ' ']).filter_map(|part| part.parse::<f64>().ok()) {
                assert!((-90.0..=WIDTH).contains(&number), "{number} in {svg}");
            }
        }
    }

    #[test]
    fn scales_are_round_and_nothing_is_drawn_of_nothing() {
        let log = Scale::of(&axis(true), [0.03, 40.0].into_iter());
        assert_eq!(log.marks, [0.01, 0.1, 1.0, 10.0, 100.0]);
        assert!((log.at(1.0) - 0.5).abs() < 1e-9);
        let linear = Scale::of(&axis(false), [3.0, 47.0].into_iter());
        assert_eq!(linear.marks, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!([0.5, 256.0, 4096.0, 60_000.0].map(mark), ["0.5", "256", "4k", "60k"]);
        let nothing = Chart { title: "t".into(), x: axis(true), y: axis(false), lines: Vec::new() };
        assert!(!nothing.svg().contains("polyline"));
    }
}
