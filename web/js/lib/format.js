// Numbers as people read them.
import { locale, t } from "./words.js";

const UNITS = ["B", "KB", "MB", "GB", "TB"];
const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

/** "412 MB", "3.2 GB". */
export function bytes(number) {
  let [value, unit] = [number, 0];
  for (; value >= 1024 && unit < UNITS.length - 1; unit += 1) value /= 1024;
  return `${value.toFixed(unit > 2 && value < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

/** "7 s", "40 s", "2 min", "90 min": no more digits than a guess deserves. */
export function roughly(seconds) {
  const whole = Math.max(1, Math.round(seconds));
  if (whole < 10) return t("seconds", { n: whole });
  if (whole < 90) return t("seconds", { n: toTens(whole) });
  if (whole < 90 * MINUTE) return t("minutes", { n: Math.round(whole / MINUTE) });
  if (whole < 3 * HOUR) return t("minutes", { n: toTens(whole / MINUTE) });
  return t("hours", { n: Math.round(whole / HOUR) });
}

function toTens(number) {
  return 10 * Math.round(number / 10);
}

/** A measured duration: "0.8 s", "43 s", "3 min 12 s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 9.95) return t("seconds", { n: seconds.toFixed(1) });
  const whole = Math.round(seconds);
  if (whole < 90) return t("seconds", { n: whole });
  return `${t("minutes", { n: Math.floor(whole / MINUTE) })} ${t("seconds", { n: whole % MINUTE })}`;
}

/** "5 minutes ago", in the page's language. */
export function ago(time) {
  const then = moment(time);
  if (!then) return "–";
  const seconds = Math.min(0, (then - Date.now()) / 1000);
  const words = new Intl.RelativeTimeFormat(locale(), { numeric: "auto" });
  if (-seconds < MINUTE) return t("just_now");
  if (-seconds < HOUR) return words.format(Math.round(seconds / MINUTE), "minute");
  if (-seconds < DAY) return words.format(Math.round(seconds / HOUR), "hour");
  return words.format(Math.round(seconds / DAY), "day");
}

/** Date and time in the page's language. */
export function when(time) {
  const then = moment(time);
  return then ? new Intl.DateTimeFormat(locale(), { dateStyle: "medium", timeStyle: "short" }).format(then) : "–";
}

/** The time of a line of the log: "14:03:22". */
export function clock(time) {
  const then = moment(time);
  return then ? then.toLocaleTimeString(locale(), { hour12: false }) : "";
}

/** A Date from ISO 8601 or from POSIX seconds. */
function moment(time) {
  if (time === null || time === undefined || time === "") return null;
  const then = new Date(typeof time === "number" ? time * 1000 : time);
  return Number.isNaN(then.getTime()) ? null : then;
}

/** "1.9x". */
export function times(factor) {
  return `${factor.toFixed(factor < 10 ? 1 : 0)}x`;
}

/** "312 → 104 ms a step": without Slipstream and with an engine; empty where that was not measured. */
export function speed({ engine_ms: engine, eager_ms: eager, timed_by: by }) {
  return engine && eager ? t(`ms_a_${by}`, { engine: ms(engine), eager: ms(eager) }) : "";
}

function ms(number) {
  return number.toFixed(number < 9.95 ? 1 : 0);
}

export function percent(fraction) {
  return `${Math.round(100 * fraction)} %`;
}

/** A relative error: "0.041 %". */
export function error(number) {
  if (number === null || number === undefined) return "–";
  const share = 100 * Math.abs(number);
  if (share && share < 0.001) return "< 0.001 %";
  return `${share < 10 ? Number(share.toPrecision(2)) : share.toFixed(0)} %`;
}

/** The server's words, as they begin a line. */
export function capitalised(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
